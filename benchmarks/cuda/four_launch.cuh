// The four-launch design that production systems use for the combine, written as well as it
// allows: epoch, push (16-byte stores, all destinations in flight), signal, wait + merge (all
// flags polled at once, 16-byte loads of all sources in flight, own part read from the input).
// Shares the merge and the addressing with the fused kernels, so that only the design differs.
#pragma once

#include "a2a_lse_reduce.cuh"
#include "launchers.h"

namespace dcp::baseline {

__global__ void epoch_kernel(const __grid_constant__ CombineParams p) { ++p.channel.own->epoch; }

template <int kRanks>
__global__ void __launch_bounds__(256) push_kernel(const __grid_constant__ CombineParams p) {
  const Call call = make_call(p.channel, load_header(p.channel));
  const uint32_t warps = blockDim.x / 32;
  Outgoing<kRanks, __nv_bfloat16, 1> outgoing;
  for (uint32_t i = blockIdx.x * warps + threadIdx.x / 32; i < p.num_items;
       i += gridDim.x * warps) {
    const UnitLane<1> unit(p, i);
    outgoing.plan(p, unit, i);
    outgoing.template load<false>(p, unit);
    outgoing.template store<false, true>(p, call, unit);
  }
}

__global__ void signal_kernel(const __grid_constant__ CombineParams p) {
  const Call call = make_call(p.channel, load_header(p.channel));
  if (is_peer(p.channel, threadIdx.x)) {
    uint64_t* flags = reinterpret_cast<uint64_t*>(p.channel.peer[threadIdx.x] + p.flag_offset);
    st_release_sys_u64(flags + region(p.channel, call.slot, p.channel.rank),
                       epoch_tag(p.channel, call));
  }
}

template <int kRanks>
__global__ void __launch_bounds__(256) combine_kernel(const __grid_constant__ CombineParams p) {
  const Channel& channel = p.channel;
  const Call call = make_call(channel, load_header(channel));
  const uint32_t lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const char* base = channel.peer[channel.rank];
  const uint32_t source = is_peer(channel, lane) ? lane : channel.rank;
  const uint64_t* flag =
      reinterpret_cast<const uint64_t*>(base + p.flag_offset) + region(channel, call.slot, source);
  const char* data_base = base + p.data_offset + region(channel, call.slot, 0) * p.data_capacity;
  const char* lse_base =
      base + p.lse_offset + region(channel, call.slot, source) * p.lse_capacity * 8;
  bool arrived = false;
  for (uint32_t i = blockIdx.x * warps + threadIdx.x / 32; i < p.num_items;
       i += gridDim.x * warps) {
    const UnitLane<1> unit(p, i);
    OwnPart<1> own;
    own.load(p, unit);
    if (!arrived) arrived = wait_for_tag(channel, call, flag, unit.row);
    if (!arrived) return;
    uint4 data[kRanks][1];
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
      data[s][0] = own.data[0];
      if (s < channel.world_size && s != channel.rank && unit.valid[0]) {
        data[s][0] = ld_stream_v4(data_base + s * p.data_capacity + unit.byte_offset(p));
      }
    }
    float lse = own.lse;
    if (is_peer(channel, lane)) {
      lse = *reinterpret_cast<const float*>(lse_base + static_cast<uint64_t>(i) * 8);
    }
    merge_unit<kRanks, __nv_bfloat16, 1>(p, unit, data, lse);
  }
}

template <int kRanks>
void launch_with(const CombineParams& p, uint32_t share, uint32_t warps, cudaStream_t stream) {
  uint32_t resident = 0;
  resident_blocks(reinterpret_cast<const void*>(combine_kernel<kRanks>), warps * 32, share,
                  &resident);
  uint32_t blocks = (p.num_items + warps - 1) / warps;
  if (blocks > resident) blocks = resident;
  epoch_kernel<<<1, 1, 0, stream>>>(p);
  push_kernel<kRanks><<<blocks, warps * 32, 0, stream>>>(p);
  signal_kernel<<<1, 32, 0, stream>>>(p);
  combine_kernel<kRanks><<<blocks, warps * 32, 0, stream>>>(p);
}

inline void launch(const CombineParams& p, uint32_t share, uint32_t warps, cudaStream_t stream) {
  if (p.channel.world_size <= 2) return launch_with<2>(p, share, warps, stream);
  if (p.channel.world_size <= 4) return launch_with<4>(p, share, warps, stream);
  return launch_with<8>(p, share, warps, stream);
}

}  // namespace dcp::baseline
