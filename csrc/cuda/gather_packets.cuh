// Gather of few rows: one launch, one hop.
// A chunk travels as four 8-byte elements (4 bytes of data, epoch). Nothing is ever re-armed: a
// word is current if and only if its epoch is. A warp's header word adds the signature.
#pragma once

#include "gather.cuh"

namespace dcp {

// Of the 32 chunks of a warp, as packets: first the lower halves, then the upper ones, so that a
// warp's store is one stretch. A link carries stores that leave gaps at half the speed.
constexpr uint32_t kWarpBytes = 32 * 32;

struct PacketPair {
  ulonglong2 low, high;
};

__device__ __forceinline__ PacketPair make_packets(const uint4& chunk, uint32_t epoch) {
  const uint64_t tag = static_cast<uint64_t>(epoch) << 32;
  return {make_ulonglong2(tag | chunk.x, tag | chunk.y),
          make_ulonglong2(tag | chunk.z, tag | chunk.w)};
}

__device__ __forceinline__ bool packets_arrived(const PacketPair& packets, uint32_t epoch) {
  const auto differs = [epoch](uint64_t word) { return static_cast<uint32_t>(word >> 32) ^ epoch; };
  return (differs(packets.low.x) | differs(packets.low.y) | differs(packets.high.x) |
          differs(packets.high.y)) == 0;
}

__device__ __forceinline__ uint4 unpack_packets(const PacketPair& packets) {
  return make_uint4(static_cast<uint32_t>(packets.low.x), static_cast<uint32_t>(packets.low.y),
                    static_cast<uint32_t>(packets.high.x), static_cast<uint32_t>(packets.high.y));
}

// Where chunk g of this rank comes from and goes to, and where the peers' chunks g arrive. Worked
// out apart from the transfer, as in the combine. Places in the channel are those of slot 0.
template <int kRanks>
struct PacketRoute {
  uint32_t g;
  const char* from;
  char* result;         // of source 0
  char* to[kRanks];     // entry k: rank (rank + k) % N
  char* header_to;      // lane s: of rank s
  const char* packets;  // of source 0
  const char* header;   // lane s: from rank s

  __device__ __forceinline__ void plan(const GatherParams& p, uint32_t chunk) {
    const Channel& channel = p.channel;
    const uint32_t lane = threadIdx.x % 32, n = channel.world_size, s = lane < n ? lane : 0;
    g = chunk;
    const ChunkPosition at = chunk_position(p, g);
    from = p.input + at.source;
    result = p.output + at.destination;
    const uint64_t place = p.data_offset + static_cast<uint64_t>(g / 32) * kWarpBytes + lane * 16;
#pragma unroll
    for (int k = 1; k < kRanks; ++k) {
      if (k >= n) break;
      to[k] = channel.peer[next_peer(channel, k)] + place + channel.rank * p.data_capacity;
    }
    const char* own = channel.peer[channel.rank];
    header_to = channel.peer[s] + p.flag_offset + (channel.rank * p.flag_capacity + g / 32) * 8;
    header = own + p.flag_offset + (s * p.flag_capacity + g / 32) * 8;
    packets = own + place;
  }

  // Makes the compiler finish plan() here.
  __device__ __forceinline__ void planned(const GatherParams& p) const {
    evaluate_now(reinterpret_cast<uint64_t>(from));
    evaluate_now(reinterpret_cast<uint64_t>(result));
#pragma unroll
    for (int k = 1; k < kRanks; ++k) {
      if (k < p.channel.world_size) evaluate_now(reinterpret_cast<uint64_t>(to[k]));
    }
    evaluate_now(reinterpret_cast<uint64_t>(header_to));
    evaluate_now(reinterpret_cast<uint64_t>(header));
    evaluate_now(reinterpret_cast<uint64_t>(packets));
  }
};

template <int kRanks>
__device__ __forceinline__ void push_packets(const GatherParams& p, const Call& call,
                                             const uint4& chunk, const PacketRoute<kRanks>& route) {
  const Channel& channel = p.channel;
  const bool valid = route.g < p.num_chunks;
  const PacketPair packets = make_packets(chunk, call.epoch);
#pragma unroll
  for (int k = 1; k < kRanks; ++k) {
    if (k >= channel.world_size) break;
    char* to = route.to[k] + (call.slot ? p.data_slot : 0);
    st_relaxed_sys_v2_if(valid, to, packets.low);
    st_relaxed_sys_v2_if(valid, to + kWarpBytes / 2, packets.high);
  }
  if (is_peer(channel, threadIdx.x % 32)) {
    st_relaxed_sys_u64(route.header_to + (call.slot ? p.flag_slot : 0), epoch_tag(channel, call));
  }
  if (valid) st_weak_v4(route.result + channel.rank * p.rank_stride, chunk);
}

template <int kRanks>
__device__ __forceinline__ void receive_packets(const GatherParams& p, const Call& call,
                                                const PacketRoute<kRanks>& route) {
  const Channel& channel = p.channel;
  const uint32_t lane = threadIdx.x % 32, n = channel.world_size;
  const bool valid = route.g < p.num_chunks;
  const char* data = route.packets + (call.slot ? p.data_slot : 0);
  const char* header = route.header + (call.slot ? p.flag_slot : 0);
  PacketPair packets[kRanks] = {};
  uint32_t missing = valid ? ((1u << n) - 1) & ~(1u << channel.rank) : 0;
  uint64_t tag = 0;
  bool header_missing = is_peer(channel, lane);
  BoundedWait wait;
  while (true) {
    if (header_missing) tag = ld_relaxed_sys_u64(header);
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
      const bool wanted = missing >> s & 1u;
      ld_relaxed_sys_v2_if(wanted, data + s * p.data_capacity, packets[s].low);
      ld_relaxed_sys_v2_if(wanted, data + s * p.data_capacity + kWarpBytes / 2, packets[s].high);
    }
    header_missing = header_missing && tag != epoch_tag(channel, call);
#pragma unroll
    for (int s = 0; s < kRanks; ++s) {
      if (packets_arrived(packets[s], call.epoch)) missing &= ~(1u << s);
    }
    if (__all_sync(kFullWarp, missing == 0 && !header_missing)) break;
    const bool differs = header_missing && static_cast<uint32_t>(tag >> 32) == call.epoch;
    if (__any_sync(kFullWarp, differs) || wait.give_up(channel)) {
      report_absence(channel, call, missing, header_missing, differs, static_cast<uint32_t>(tag),
                     route.g / 32);
      for (uint32_t s = 0; s < n && valid; ++s) poison_chunk(p, p.output, s, route.g);
      return;
    }
  }
  if (!valid) return;
#pragma unroll
  for (int s = 0; s < kRanks; ++s) {
    if (s >= n || s == channel.rank) continue;
    st_weak_v4(route.result + s * p.rank_stride, unpack_packets(packets[s]));
  }
}

// One launch per call; the result is always fresh memory. Block 0 does the rendezvous; each warp
// of the others sends 32 chunks and then waits for the same of its peers, before it goes on.
template <int kRanks>
__global__ void __launch_bounds__(kGatherThreads)
    gather_packets_kernel(const __grid_constant__ GatherParams p) {
  if (blockIdx.x == 0) {
    take_turn(p.channel);
    meet_peers(p.channel, make_call(p.channel, load_header(p.channel)), true);
    return;
  }
  const uint32_t first = (blockIdx.x - 1) * blockDim.x + threadIdx.x;
  const uint32_t stride = (gridDim.x - 1) * blockDim.x;
  const uint32_t end = (p.num_chunks + 31) / 32 * 32;  // whole warps
  PacketRoute<kRanks> route;
  route.plan(p, first);
  route.planned(p);
  take_turn(p.channel);
  const uint4 header = load_header(p.channel);
#pragma unroll 1
  while (true) {
    uint4 chunk = armed_chunk();
    ld_stream_v4_if(route.g < p.num_chunks, route.from, chunk);
    const Call call = make_call(p.channel, not_before_here(header));
    if (call.dead) {
      say_epoch_is_read();
      if (p.pad_chunks > 0) zero_padding(p, p.output, first, stride);
      poison_gather(p, p.output, first, stride);
      break;
    }
    if (route.g == first) stress_point(p.channel, call, 0);
    if (route.g < end) push_packets<kRanks>(p, call, chunk, route);
    if (route.g == first) {
      say_epoch_is_read();
      if (p.pad_chunks > 0) zero_padding(p, p.output, first, stride);
      stress_point(p.channel, call, 1);
    }
    if (route.g < end) receive_packets<kRanks>(p, call, route);
    if (route.g + stride >= end) break;
    route.plan(p, route.g + stride);
  }
  count_block(p.channel);
}

}  // namespace dcp
