// Instantiations and launcher of the gather kernels.

#include "gather_packets.cuh"
#include "gather_slices.cuh"
#include "launchers.h"

namespace dcp {
namespace {

using Kernel = void (*)(const GatherParams);

template <int kRanks>
Kernel pick_layout(const GatherParams& p, GatherKernel kernel) {
  if (kernel == GatherKernel::kPackets) return gather_packets_kernel<kRanks>;
  return p.output == nullptr ? gather_slices_kernel<kRanks, Layout::kFinal>
                             : gather_slices_kernel<kRanks, Layout::kPacked>;
}

Kernel pick_kernel(const GatherParams& p, GatherKernel kernel) {
  const uint32_t n = p.channel.world_size;
  if (n <= 2) return pick_layout<2>(p, kernel);
  if (n <= 4) return pick_layout<4>(p, kernel);
  if (n <= 8) return pick_layout<8>(p, kernel);
  return pick_layout<16>(p, kernel);
}

uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

}  // namespace

// A function of the shape alone: peers must cut the same slices. As small as leaves each block of
// a large chip with one, since a second one costs a whole turn; at most what a block has in flight.
void plan_slices(GatherParams& p) {
  p.slice_chunks = kGatherThreads;
  while (p.slice_chunks < kGatherThreads * kGatherBatch && p.num_chunks > 128 * p.slice_chunks) {
    p.slice_chunks *= 2;
  }
}

cudaError_t launch_gather(const GatherParams& p, const GatherLaunch& launch, cudaStream_t stream) {
  if (launch.kernel == GatherKernel::kPackets && p.output == nullptr) {
    return cudaErrorInvalidValue;
  }
  const Kernel kernel = pick_kernel(p, launch.kernel);
  uint32_t threads = kGatherThreads;
  uint32_t wanted = 0;
  if (launch.kernel == GatherKernel::kPackets) {
    threads = p.num_chunks <= 64 * 128 ? 64 : 128;
    wanted = ceil_div(p.num_chunks, threads) + 1;
  } else {
    wanted = ceil_div(p.num_chunks, p.slice_chunks) + 1;
  }
  uint32_t resident = 0;
  const cudaError_t error =
      resident_blocks(reinterpret_cast<const void*>(kernel), threads, launch.share, &resident);
  if (error != cudaSuccess) return error;
  const uint32_t half = resident / 2;
  if (launch.max_blocks != 0 && launch.max_blocks < resident) resident = launch.max_blocks;
  if (resident < 2) return cudaErrorCooperativeLaunchTooLarge;
  if (wanted < 2) wanted = 2;
  const uint32_t blocks = wanted < resident ? wanted : resident;
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config;
  const cudaError_t configured =
      launch_config(blocks, threads, stream, launch.overlap_launch, &attribute, &config);
  if (configured != cudaSuccess) return configured;
  GatherParams launched = p;
  const uint32_t regions = p.output == nullptr ? 1 : p.channel.world_size;
  launched.data_slot = regions * p.data_capacity;
  launched.flag_slot = p.channel.world_size * p.flag_capacity * 8;
  launched.channel.invites_next = launch.invite_next && blocks <= half;
  return cudaLaunchKernelEx(&config, kernel, launched);
}

}  // namespace dcp
