// Combine for few tokens: one launch, one hop. Payload words say themselves that they have
// arrived (any value but kArmedWord), so there is neither flag nor fence behind the data. The
// lane that reads a word re-arms it; a warp has its own copy of each LSE word, because a shared
// one could be re-armed by one warp before another has seen it.
#pragma once

#include "a2a_lse_reduce.cuh"
#include "full_lse.cuh"

namespace dcp {

// What the peers sent for one unit. False after a fault.
template <int kRanks, typename Payload, int kChunks>
__device__ __forceinline__ bool receive_unit(const CombineParams& p, const Call& call,
                                             const UnitLane<kChunks>& unit, uint32_t unit_index,
                                             OwnPart<kChunks>& own) {
  const Channel& channel = p.channel;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t n = channel.world_size;
  char* base = channel.peer[channel.rank];
  char* data_base = base + p.data_offset + region(channel, call.slot, 0) * p.data_capacity;
  char* lse_word =
      base + p.lse_offset +
      (region(channel, call.slot, lane < n ? lane : 0) * p.lse_capacity + unit_index) * 8;
  const uint32_t expected_tag = channel.signature + call.epoch;

  uint4 data[kRanks][kChunks];
#pragma unroll
  for (int s = 0; s < kRanks; ++s) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) data[s][c] = own.data[c];
  }
  const uint32_t peers = ((1u << n) - 1) & ~(1u << channel.rank);
  uint32_t missing = peers;  // ranks whose payload this lane still lacks
  float lse = own.lse;       // lane `rank`: own; other lanes: that rank's, once here
  uint64_t word = 0;
  bool lse_missing = is_peer(channel, lane);
  BoundedWait wait;
  while (true) {
    if (lse_missing) word = ld_relaxed_sys_u64(lse_word);
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if ((missing >> s & 1u) && unit.valid[c]) {
          data[s][c] = ld_relaxed_sys_v4(data_base + s * p.data_capacity + unit.byte_offset(p, c));
        }
      }
    }
    if (lse_missing && word != kArmedWord64) {
      lse_missing = false;
      lse = __uint_as_float(static_cast<uint32_t>(word));
    }
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
      bool here = true;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) here = here && (!unit.valid[c] || has_arrived(data[s][c]));
      if (here) missing &= ~(1u << s);
    }
    // An empty rank sends no payload.
    missing &= ~__ballot_sync(kFullWarp, !lse_missing && lse == kEmptyLse);
    if (__all_sync(kFullWarp, missing == 0 && !lse_missing)) break;
    if (wait.give_up(channel)) {
      const uint32_t absent =
          (__reduce_or_sync(kFullWarp, missing) | __ballot_sync(kFullWarp, lse_missing)) & peers;
      if (absent != 0 && lane == 0) {
        report_fault(channel, call, FaultKind::kTimeout, __ffs(absent) - 1, unit.row, 0);
      }
      return false;
    }
  }
  const uint32_t tag = word >> 32;
  const bool differs = is_peer(channel, lane) && tag != expected_tag;
  if (differs) {
    report_fault(channel, call, FaultKind::kMismatch, lane, unit.row, tag - call.epoch);
  }
  if (__any_sync(kFullWarp, differs)) return false;
  stress_point(channel, call, 2);

  // Re-arm, ahead of the merge, which then overlaps it. Strong stores: a peer's store to the same
  // word two calls on must not race with them.
  uint32_t full = __ballot_sync(kFullWarp, lse != kEmptyLse) & peers;
#ifdef DCP_STRESS
  if (channel.stress.variant == Variant::kDeferredClear) {  // wrong: the slot of the call before
    full = peers;
    const uint64_t back = region(channel, call.slot ^ 1u, 0) - region(channel, call.slot, 0);
    data_base += back * p.data_capacity;
    lse_word += back * p.lse_capacity * 8;
  }
#endif
#pragma unroll
  for (int s = 0; s < kRanks; ++s) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if ((full >> s & 1u) && unit.valid[c]) {
        st_relaxed_sys_v4(data_base + s * p.data_capacity + unit.byte_offset(p, c), armed_chunk());
      }
    }
  }
  if (is_peer(channel, lane)) st_relaxed_sys_u64(lse_word, kArmedWord64);
  merge_unit<kRanks, Payload, kChunks>(p, unit, data, lse);
  return true;
}

// Brings the lines of parameters that the kernel is going to need into the constant cache.
__device__ __forceinline__ void touch_parameters(const CombineParams& p) {
  evaluate_now(reinterpret_cast<uint64_t>(p.channel.own));
  evaluate_now(reinterpret_cast<uint64_t>(p.channel.peer[0]));
  evaluate_now(reinterpret_cast<uint64_t>(p.partial));
  evaluate_now(reinterpret_cast<uint64_t>(p.output));
  evaluate_now(p.num_items);
  evaluate_now(p.data_offset);
  evaluate_now(p.full_lse_offset);
  evaluate_now(p.scatter.uniform);
}

// One launch per call. Block 0 does the rendezvous; the warps of the others each take units
// worker, worker + workers, ... and push `window` units ahead of the one they wait for.
template <int kRanks, typename Payload, int kChunks>
__global__ void __launch_bounds__(256)
    a2a_lse_reduce_lamport_kernel(const __grid_constant__ CombineParams p) {
  const uint32_t warps = blockDim.x / 32;
  const uint32_t worker = (blockIdx.x - 1) * warps + threadIdx.x / 32;
  const uint32_t workers = (gridDim.x - 1) * warps;
  const UnitLane<kChunks> first(p, worker);
  // What needs no memory, only parameters, comes ahead of the wait for the launch before.
  touch_parameters(p);
  grid_dependency_wait();
  const uint2 epoch_and_dead = load_epoch_and_dead(p.channel);
  if (blockIdx.x == 0) {
    const Call call = make_call(p.channel, epoch_and_dead);
    rendezvous(p.channel, call, true, false);
    const uint32_t ticket = block_arrive(p.channel);
    rendezvous(p.channel, call, false, true);
    finish_call(p.channel, call, ticket);
    return;
  }

  // The first unit's input is loaded before the epoch is known.
  const bool has_work = worker < p.num_items;
  Outgoing<kRanks, Payload, kChunks> outgoing;
  OwnPart<kChunks> own;
  if (has_work) {
    outgoing.load(p, first);
    own.load(p, first);
  }
  const Call call = make_call(p.channel, epoch_and_dead);
  if (call.dead) {
    block_arrive(p.channel);
    for (uint32_t i = worker; i < p.num_items; i += workers) poison_unit<Payload, kChunks>(p, i);
    merge_full_lse(p, call, worker, workers);
    return;
  }
  stress_point(p.channel, call, 0);
  if (has_work) outgoing.template store<true>(p, call, first, worker);
  const uint32_t ticket = block_arrive(p.channel);

  uint32_t ahead = worker + workers;
  for (uint32_t w = 0; w < p.window && ahead < p.num_items; ++w, ahead += workers) {
    const UnitLane<kChunks> unit(p, ahead);
    outgoing.load(p, unit);
    outgoing.template store<true>(p, call, unit, ahead);
  }
  push_full_lse(p, call, worker, workers);
  stress_point(p.channel, call, 1);

  for (uint32_t i = worker; i < p.num_items; i += workers) {
    const UnitLane<kChunks> unit(p, i);
    if (i != worker) own.load(p, unit);
    if (unit.row < rows_of(p, p.channel.rank) &&
        !receive_unit<kRanks, Payload, kChunks>(p, call, unit, i, own)) {
      poison_unit<Payload, kChunks>(p, i);
    }
    if (ahead < p.num_items) {
      const UnitLane<kChunks> next(p, ahead);
      outgoing.load(p, next);
      outgoing.template store<true>(p, call, next, ahead);
      ahead += workers;
    }
  }
  merge_full_lse(p, call, worker, workers);
  finish_call(p.channel, call, ticket);
}

}  // namespace dcp
