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
// waits for later work.
#pragma once

#include "params.h"
#include "ptx.cuh"

namespace dcp {

constexpr uint32_t kPollsBeforeClock = 64;  // about 20 us, then read the clock and back off

struct Call {
  uint32_t epoch;
  uint32_t slot;
  bool dead;
};

__device__ __forceinline__ uint2 load_epoch_and_dead(const Channel& channel) {
  return ld_relaxed_gpu_v2(&channel.own->epoch);
}

__device__ __forceinline__ Call make_call(const Channel& channel, uint2 epoch_and_dead) {
  Call call{epoch_and_dead.x, epoch_and_dead.x & 1u, epoch_and_dead.y != 0};
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

// Counts this block as one that has read the epoch. Thread 0, after a branch on the epoch, so
// that the read cannot be overtaken. The ticket is for finish_call(): looking at it at once would
// stall the warp for a round trip to L2.
__device__ __forceinline__ uint32_t arrive(const Channel& channel) {
  return atom_add_relaxed_gpu(&channel.own->arrive, 1);
}

// The same where every warp has read the epoch for itself: all warps of the block must call it,
// whatever they read; only warp 0 waits for the others. The ticket is valid in thread 0.
__device__ __forceinline__ uint32_t block_arrive(const Channel& channel) {
  if (blockDim.x > 32) {
    if (threadIdx.x >= 32) {
      named_barrier_arrive(1, blockDim.x);
      return 0;
    }
    named_barrier_sync(1, blockDim.x);
  }
  return threadIdx.x == 0 ? arrive(channel) : 0;
}

// The block that arrived last starts the next epoch. Nobody waits for it: the next launch on the
// stream sees it.
__device__ __forceinline__ void finish_call(const Channel& channel, const Call& call,
                                            uint32_t ticket) {
  if (threadIdx.x != 0 || ticket != gridDim.x - 1) return;
  ChannelHeader* header = channel.own;
  const uint32_t next = call.epoch + 1;
  st_relaxed_gpu_u32(&header->arrive, 0);
  st_relaxed_gpu_u32(&header->epoch, next == 0 ? kFirstEpoch : next);
}

// Call of a kernel whose blocks must agree on `dead` (they meet at barriers): thread 0 reads for
// all, and alone has to arrive.
__device__ __forceinline__ Call begin_block_call(const Channel& channel) {
  __shared__ uint2 epoch_and_dead;
  if (threadIdx.x == 0) epoch_and_dead = load_epoch_and_dead(channel);
  __syncthreads();
  return make_call(channel, epoch_and_dead);
}

// Time limit of one wait, by the clock. The whole warp calls give_up() together after each
// fruitless poll; true means that the time is over or another warp has met a fault.
class BoundedWait {
 public:
  __device__ __forceinline__ bool give_up(const Channel& channel) {
    if (++polls_ < kPollsBeforeClock) return false;
    const uint64_t now = globaltimer_ns();
    if (polls_ == kPollsBeforeClock) deadline_ = now + channel.timeout_ns;
    const bool dead = ld_relaxed_gpu_u32(&channel.own->dead) != 0;
    const bool late = static_cast<int64_t>(now - deadline_) >= 0;
    if (__any_sync(kFullWarp, dead || late)) return true;
    sleep_ns(100);
    return false;
  }

 private:
  uint32_t polls_ = 0;
  uint64_t deadline_ = 0;
};

// The newest epoch that `peer` has announced to this rank.
__device__ __forceinline__ uint32_t epoch_seen(const Channel& channel, uint32_t peer) {
  const ChannelHeader* own = channel.own;
  const uint32_t a = ld_relaxed_sys_u64(&own->rendezvous[0][peer]) >> 32;
  const uint32_t b = ld_relaxed_sys_u64(&own->rendezvous[1][peer]) >> 32;
  return static_cast<int32_t>(a - b) > 0 ? a : b;
}

// Marks the channel dead and, as the first to do so, leaves the record for the host. One thread.
__device__ __forceinline__ void report_fault(const Channel& channel, const Call& call,
                                             FaultKind kind, uint32_t peer, uint32_t row,
                                             uint32_t signature_seen) {
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
__device__ __forceinline__ void rendezvous(const Channel& channel, const Call& call, bool publish,
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

}  // namespace dcp
