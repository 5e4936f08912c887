// Combine by marked words: one launch, one hop. Payload words say themselves that they have
// arrived (any value but kArmedWord), so there is neither flag nor fence behind the data. The
// lane that reads a word re-arms it; a warp has its own copy of each LSE word, because a shared
// one could be re-armed by one warp before another has seen it.
#pragma once

#include "a2a_lse_reduce.cuh"
#include "full_lse.cuh"
#include "lse_batch.cuh"

namespace dcp {

// Where the peers' parts of one unit arrive. As with Outgoing, planned ahead.
template <int kRanks, int kChunks>
struct Incoming {
  char* data;  // of source 0 in slot 0
  char* lse;   // lane s: the word of source s in slot 0

  __device__ __forceinline__ void plan(const CombineParams& p, const UnitLane<kChunks>& unit,
                                       uint32_t unit_index) {
    const Channel& channel = p.channel;
    const uint32_t lane = threadIdx.x % 32;
    char* base = channel.peer[channel.rank];
    data = base + p.data_offset + unit.byte_offset(p);
    lse = base + p.lse_offset +
          ((lane < channel.world_size ? lane : 0) * p.lse_capacity + unit_index) * 8;
  }

  __device__ __forceinline__ void planned() const {
    evaluate_now(reinterpret_cast<uint64_t>(data));
    evaluate_now(reinterpret_cast<uint64_t>(lse));
  }
};

// Waits for what the peers sent for one unit, re-arms it and merges it with this rank's own part
// (entry 0 of `own`). False after a fault.
template <int kRanks, typename Payload, int kChunks>
__device__ __forceinline__ bool receive_unit(const CombineParams& p, const Call& call,
                                             const UnitLane<kChunks>& unit,
                                             const Incoming<kRanks, kChunks>& incoming,
                                             const Outgoing<kRanks, Payload, kChunks>& own) {
  const Channel& channel = p.channel;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t peers = ((1u << channel.world_size) - 1) & ~(1u << channel.rank);
  const uint32_t expected_tag = channel.signature + call.epoch;
  char* data_base = incoming.data + (call.slot ? p.data_slot : 0);
  char* lse_word = incoming.lse + (call.slot ? p.lse_slot : 0);

  uint4 data[kRanks][kChunks];
#pragma unroll
  for (int s = 0; s < kRanks; ++s) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) data[s][c] = own.data[0][c];
  }
  uint32_t missing = peers;  // ranks whose payload this lane still lacks
  uint32_t empty;            // ranks that are empty, once their LSEs are here
  float lse = own.lse;       // lane `rank`: own; other lanes: that rank's, once here
  uint64_t word = kArmedWord64;
  bool lse_missing = is_peer(channel, lane);
  if (!lse_missing && lane != channel.rank) lse = kEmptyLse;
  BoundedWait wait;
  while (true) {
    if (lse_missing) word = ld_relaxed_sys_u64(lse_word);
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        ld_relaxed_sys_v4_if(missing >> s & 1u && unit.valid[c],
                             data_base + s * p.data_capacity + c * kChunkStride, data[s][c]);
      }
    }
    if (lse_missing && static_cast<uint32_t>(word >> 32) == expected_tag) {
      lse_missing = false;
      lse = __uint_as_float(static_cast<uint32_t>(word));
    }
    // An empty rank sends no payload.
    empty = __ballot_sync(kFullWarp, !lse_missing && lse == kEmptyLse);
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
      bool here = empty >> s & 1u;
      bool all = true;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) all = all && (!unit.valid[c] || has_arrived(data[s][c]));
      if (here || all) missing &= ~(1u << s);
    }
    if (__all_sync(kFullWarp, missing == 0 && !lse_missing)) break;
    // A word of another call does not go away.
    const bool differs = lse_missing && word != kArmedWord64;
    if (__any_sync(kFullWarp, differs) || wait.give_up(channel)) {
      const uint32_t signature = static_cast<uint32_t>(word >> 32) - call.epoch;
      report_absence(channel, call, missing, lse_missing, differs, signature, unit.row);
      return false;
    }
  }
  stress_point(channel, call, 2);

  // Re-arm, ahead of the merge, which then overlaps it. Strong stores: a peer's store to the same
  // word two calls on must not race with them.
  uint32_t full = peers & ~empty;
#ifdef DCP_STRESS
  if (channel.stress.variant == Variant::kDeferredClear) {  // wrong: the slot of the call before
    full = peers;
    data_base = incoming.data + (call.slot ? 0 : p.data_slot);
    lse_word = incoming.lse + (call.slot ? 0 : p.lse_slot);
  }
#endif
#pragma unroll
  for (int s = 0; s < kRanks; ++s) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      st_relaxed_sys_v4_if(full >> s & 1u && unit.valid[c],
                           data_base + s * p.data_capacity + c * kChunkStride, armed_chunk());
    }
  }
  if (is_peer(channel, lane)) st_relaxed_sys_u64(lse_word, kArmedWord64);
  merge_unit<kRanks, Payload, kChunks>(p, unit, data, lse);
  return true;
}

// Brings the lines of parameters that the kernel is going to need into the constant cache.
__device__ __forceinline__ void touch_parameters(const CombineParams& p) {
  evaluate_now(reinterpret_cast<uint64_t>(p.channel.own));
  evaluate_now(p.channel.signature);
  evaluate_now(reinterpret_cast<uint64_t>(p.output));
  evaluate_now(p.output_dtype == Dtype::kFloat32);
  evaluate_now(p.num_items);
  evaluate_now(p.data_slot);
  evaluate_now(p.full_lse_offset);
  evaluate_now(p.scatter.uniform);
}

// What a call over a dead channel leaves.
template <typename Payload, int kChunks>
DCP_OUT_OF_LINE void poison_call(const CombineParams& p, uint32_t worker, uint32_t workers) {
  for (uint32_t i = worker; i < p.num_items; i += workers) poison_unit<Payload, kChunks>(p, i);
}

// Blocks of 256 threads a multiprocessor shall have room for. With two ranks a cap of 64 registers
// saves 0.8 us of 4.9 at 16 tokens of 128 heads and costs nothing at one token. With more ranks the
// mere wish for two blocks costs 0.2 us, although it spills nothing.
constexpr int min_blocks(int ranks) { return ranks <= 2 ? 4 : 0; }

// One launch per call. Block 0 does the rendezvous; the warps of the others each take units
// worker, worker + workers, ... and send one before they wait for the same of their peers, so
// that what arrives is merged while later units are on the way. What needs no memory, only
// parameters, comes ahead of the wait for the launch before.
//
// kBatchesLses: a block's first warp stores the LSE words of all its warps' units. It takes them up
// no later than any of them, so that what a peer waits for is sent ahead of waits for later units.
template <int kRanks, typename Payload, int kChunks, bool kBatchesLses>
__global__ void __launch_bounds__(256, min_blocks(kRanks))
    a2a_lse_reduce_lamport_kernel(const __grid_constant__ CombineParams p) {
  const uint32_t warps = blockDim.x / 32;
  const uint32_t worker = (blockIdx.x - 1) * warps + threadIdx.x / 32;
  const uint32_t workers = (gridDim.x - 1) * warps;
  if (blockIdx.x == 0) {
    take_turn(p.channel);
    meet_peers(p.channel, make_call(p.channel, load_header(p.channel)), true);
    return;
  }
  uint32_t i = worker;
  UnitLane<kChunks> unit(p, i);
  Outgoing<kRanks, Payload, kChunks> outgoing;
  Incoming<kRanks, kChunks> incoming;
  outgoing.plan(p, unit, i);
  incoming.plan(p, unit, i);
  outgoing.template planned<!kBatchesLses>(p);
  incoming.planned();
  touch_parameters(p);
  take_turn(p.channel);
  const uint4 header = load_header(p.channel);
#pragma unroll 1
  while (true) {
    outgoing.template load<true>(p, unit);
    LseBatch<kRanks> lses;
    if (kBatchesLses && threadIdx.x < 32) lses.load(p, i);
    // Not before the first unit's input is on its way, which then hides how long the epoch takes.
    const Call call = make_call(p.channel, not_before_here(header));
    if (call.dead) {
      say_epoch_is_read();
      poison_call<Payload, kChunks>(p, worker, workers);
      break;
    }
    if (i == worker) stress_point(p.channel, call, 0);
    outgoing.template store<true, !kBatchesLses>(p, call, unit);
    if (kBatchesLses && threadIdx.x < 32) lses.store(p, call, i);
    if (i == worker) {
      say_epoch_is_read();
      if (p.full_lse_output != nullptr) push_full_lse(p, call, worker, workers);
      stress_point(p.channel, call, 1);
    }
    if ((outgoing.exists >> p.channel.rank & 1u) &&
        !receive_unit<kRanks, Payload, kChunks>(p, call, unit, incoming, outgoing)) {
      poison_unit<Payload, kChunks>(p, i);
    }
    i += workers;
    if (i >= p.num_items) break;
    unit = UnitLane<kChunks>(p, i);
    outgoing.plan(p, unit, i);
    incoming.plan(p, unit, i);
  }
  if (p.full_lse_output != nullptr) {
    merge_full_lse(p, make_call(p.channel, header), worker, workers);
  }
  count_block(p.channel);
}

}  // namespace dcp
