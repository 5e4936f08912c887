// Calls, epochs, slots, bounded waits and faults of one channel.
//
// Protocol. Call e of a channel uses slot e & 1. Every call is a rendezvous: one warp of the grid
// releases (epoch, signature) to every peer and acquires theirs. Releasing e says "I have finished
// calls up to e - 1, all reads and re-arms included", since a launch starts after its predecessor
// on the stream has ended. A rank that starts call e + 2 has acquired e + 1 from every peer, hence
// every peer is done with call e, hence slot e & 1 is free everywhere: two slots are enough.
// Payload needs no order against the rendezvous; it carries its own arrival mark or flag.
//
// Deadlock. The blocks of a launch are co-resident (the launcher bounds the grid), each visits its
// work in rising order, and whatever it waits for was published by a peer ahead of that peer's
// waits for later work. Where something else holds a part of the chip and waits for other ranks
// itself (a collective on another stream, an exchange of another group), fewer blocks are resident.
// With equal grids on all ranks that is enough as long as it is one: every kernel gives block b
// work that depends on block b of the peers alone, and blocks come onto the chip in rising order
// (as they do; CUDA does not promise it). So the first block that some rank has not finished is
// resident wherever there is room for one, and the launcher leaves that much to the next kernel.
#pragma once

#include "params.h"
#include "ptx.cuh"

namespace dcp {

constexpr uint32_t kPollsBeforeClock = 64;  // about 20 us, then read the clock and back off

// Start of every kernel: waits for the launch before this one and then lets the next one in, whose
// set-up this launch then hides. Not the other way round: launches would queue on the chip without
// limit, and ranks that share it would keep each other out.
__device__ __forceinline__ void take_turn(const Channel& channel) {
  grid_dependency_wait();
  if (channel.invites_next) launch_dependents();
}

struct Call {
  uint32_t epoch;
  uint32_t slot;
  bool dead;
};

// The words of the own header that make_call() takes.
__device__ __forceinline__ uint4 load_header(const Channel& channel) {
  return ld_relaxed_gpu_v4(channel.own);
}

// Zero-filled words stand for no call, so what would be the epochs 0 and 1 after 2^32 calls have
// another name.
__device__ __forceinline__ Call make_call(const Channel& channel, uint4 header) {
  const uint32_t epoch = header.y < kFirstEpoch ? header.y | 0x80000000u : header.y;
  Call call{epoch, epoch & 1u, header.z != 0};
#ifdef DCP_STRESS
  if (channel.stress.variant == Variant::kOneSlot) call.slot = 0;
  if (channel.stress.variant == Variant::kHostParity) call.slot = channel.stress.host_slot;
#endif
  return call;
}

// Where a test delays this warp; nothing in a production build.
__device__ __forceinline__ void stress_point(const Channel& channel, const Call& call,
                                             uint32_t point) {
#ifdef DCP_STRESS
  if (channel.stress.max_delay_ns == 0) return;
  uint32_t x = channel.stress.seed ^ (call.epoch * 0x9E3779B9u) ^ (channel.rank * 0x85EBCA6Bu) ^
               (blockIdx.x * 0xC2B2AE35u) ^ (point * 0x27D4EB2Fu);
  x ^= x >> 15;
  x *= 0x2C1B3C6Du;
  x ^= x >> 12;
  x *= 0x297A2D39u;
  x ^= x >> 15;
  if (x & 3u) return;  // three of four points pass undelayed
  const uint64_t until = globaltimer_ns() + (x >> 2) % channel.stress.max_delay_ns;
  while (static_cast<int64_t>(globaltimer_ns() - until) < 0) sleep_ns(200);
#endif
}

// The next epoch begins when all blocks of this call have said that they have read it: they add 1
// to `readers`, block 0 what is missing to 2^32, and the last of these carries into `epoch`, in
// whatever order they come. Nobody has to wait for an answer. The next launch on the stream sees
// the new epoch. One thread, after a branch on the epoch, so that the read cannot be overtaken.
__device__ __forceinline__ void count_reader(const Channel& channel) {
  red_add_relaxed_gpu_u64(channel.own, 1);
}

// By block 0.
__device__ __forceinline__ void count_readers_up(const Channel& channel) {
  red_add_relaxed_gpu_u64(channel.own, (1ull << 32) - (gridDim.x - 1));
}

// Where every warp reads the epoch for itself: each says so once it has, which does not block, and
// warp 0 counts the block at its end.
__device__ __forceinline__ void say_epoch_is_read() {
  if (threadIdx.x >= 32) named_barrier_arrive(1, blockDim.x);
}

__device__ __forceinline__ void count_block(const Channel& channel) {
  if (threadIdx.x >= 32) return;
  if (blockDim.x > 32) named_barrier_sync(1, blockDim.x);
  if (threadIdx.x == 0) count_reader(channel);
}

// Call of a kernel whose blocks must agree on `dead` (they meet at barriers): thread 0 reads for
// all.
__device__ __forceinline__ Call begin_block_call(const Channel& channel) {
  __shared__ uint4 header;
  if (threadIdx.x == 0) header = load_header(channel);
  __syncthreads();
  return make_call(channel, header);
}

// Time limit of one wait, by the clock. The whole warp calls give_up() together after each
// fruitless poll; true means that the time is over or another warp has met a fault.
class BoundedWait {
 public:
  __device__ __forceinline__ bool give_up(const Channel& channel) {
    if (++polls_ < kPollsBeforeClock) return false;
    deadline_ = look_at_clock(channel, deadline_);
    return deadline_ == kOver;
  }

 private:
  static constexpr uint64_t kUnknown = 0, kOver = ~0ull;

  // The deadline, once it is known, or kOver.
  static DCP_OUT_OF_LINE uint64_t look_at_clock(const Channel& channel, uint64_t deadline) {
    const uint64_t now = globaltimer_ns();
    if (deadline == kUnknown) deadline = now + channel.timeout_ns;
    const bool dead = ld_relaxed_gpu_u32(&channel.own->dead) != 0;
    const bool late = static_cast<int64_t>(now - deadline) >= 0;
    if (__any_sync(kFullWarp, dead || late)) return kOver;
    sleep_ns(100);
    return deadline;
  }

  uint32_t polls_ = 0;
  uint64_t deadline_ = kUnknown;
};

// The newest epoch that `peer` has announced to this rank.
__device__ __forceinline__ uint32_t epoch_seen(const Channel& channel, uint32_t peer) {
  const ChannelHeader* own = channel.own;
  const uint32_t a = ld_relaxed_sys_u64(&own->rendezvous[0][peer]) >> 32;
  const uint32_t b = ld_relaxed_sys_u64(&own->rendezvous[1][peer]) >> 32;
  return static_cast<int32_t>(a - b) > 0 ? a : b;
}

// Marks the channel dead and, as the first to do so, leaves the record for the host. One thread.
DCP_OUT_OF_LINE void report_fault(const Channel& channel, Call call, FaultKind kind, uint32_t peer,
                                  uint32_t row, uint32_t signature_seen) {
  if (atom_cas_relaxed_gpu(&channel.own->dead, 0, 1) != 0) return;
  volatile FaultRecord* record = channel.fault;
  record->kind = static_cast<uint32_t>(kind);
  record->op = channel.op;
  record->site = channel.site;
  record->rank = channel.rank;
  record->peer = peer;
  record->epoch_wanted = call.epoch;
  record->epoch_seen = epoch_seen(channel, peer);
  record->row = row;
  record->signature_wanted = channel.signature;
  record->signature_seen = signature_seen;
  st_release_sys_u32(&channel.fault->state, 1);
}

__device__ __forceinline__ uint64_t epoch_tag(const Channel& channel, const Call& call) {
  return static_cast<uint64_t>(call.epoch) << 32 | channel.signature;
}

__device__ __forceinline__ bool is_peer(const Channel& channel, uint32_t lane) {
  return lane < channel.world_size && lane != channel.rank;
}

// Leaves record of a wait that ended without everything: peer `lane` sent something else
// (`differs`), or its word is missing, or payload of the ranks in `missing`. Whole warp.
DCP_OUT_OF_LINE void report_absence(const Channel& channel, Call call, uint32_t missing,
                                    bool word_missing, bool differs, uint32_t signature_seen,
                                    uint32_t row) {
  const uint32_t lane = threadIdx.x % 32;
  if (differs) report_fault(channel, call, FaultKind::kMismatch, lane, row, signature_seen);
  const uint32_t absent = __reduce_or_sync(kFullWarp, missing) |
                          __ballot_sync(kFullWarp, word_missing && is_peer(channel, lane));
  if (absent != 0 && lane == 0) {
    report_fault(channel, call, FaultKind::kTimeout, __ffs(absent) - 1, row, 0);
  }
}

// Waits until word `lane` (lane-specific address, peers only) holds this epoch, then compares the
// signature. Whole warp; lanes that are no peer pass any address. False: a fault was reported.
__device__ __forceinline__ bool wait_for_tag(const Channel& channel, const Call& call,
                                             const uint64_t* word, uint32_t row) {
  const uint32_t lane = threadIdx.x % 32;
  const bool waits = is_peer(channel, lane);
  uint64_t tag = epoch_tag(channel, call);
  bool here = !waits;
  BoundedWait wait;
  while (true) {
    if (!here) {
      tag = ld_acquire_sys_u64(word);
      here = static_cast<uint32_t>(tag >> 32) == call.epoch;
    }
    if (__all_sync(kFullWarp, here)) break;
    if (wait.give_up(channel)) {
      const uint32_t missing = __ballot_sync(kFullWarp, !here);
      if (missing != 0 && lane == __ffs(missing) - 1) {
        report_fault(channel, call, FaultKind::kTimeout, lane, row, 0);
      }
      return false;
    }
  }
  const bool differs = static_cast<uint32_t>(tag) != channel.signature;
  if (differs) {
    report_fault(channel, call, FaultKind::kMismatch, lane, row, static_cast<uint32_t>(tag));
  }
  return !__any_sync(kFullWarp, differs);
}

// The rendezvous described at the top, by warp 0 of block 0.
__device__ __forceinline__ void rendezvous(const Channel& channel, Call call, bool publish,
                                           bool wait) {
  if (threadIdx.x >= 32 || call.dead) return;
  const uint32_t lane = threadIdx.x;
  const uint32_t slot = call.epoch & 1;
  if (publish && is_peer(channel, lane)) {
    st_release_sys_u64(&channel.header[lane]->rendezvous[slot][channel.rank],
                       epoch_tag(channel, call));
  }
  if (wait) {
    const uint32_t source = is_peer(channel, lane) ? lane : channel.rank;
    wait_for_tag(channel, call, &channel.own->rendezvous[slot][source], 0xFFFFFFFFu);
  }
}

// All that block 0 does. `publish`: no launch ahead of this one has.
__device__ __forceinline__ void meet_peers(const Channel& channel, Call call, bool publish) {
  rendezvous(channel, call, publish, false);
  if (threadIdx.x == 0) count_readers_up(channel);
  rendezvous(channel, call, false, true);
}

}  // namespace dcp
