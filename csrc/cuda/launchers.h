// Host entry points of the kernels. No torch; errors are CUDA's.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace dcp {

enum class CombineKernel : int32_t { kLamport = 0, kTiled = 1 };

// `share`: how many such launches must be able to run on this GPU at the same time (ranks that
// share it, micro-batches). Zero in the others means "choose".
struct CombineLaunch {
  CombineKernel kernel = CombineKernel::kLamport;
  Dtype payload = Dtype::kBFloat16;
  uint32_t share = 1;
  uint32_t warps_per_block = 0;
  uint32_t chunks_per_lane = 0;
  uint32_t max_blocks = 0;
  // Whether one warp of a block stores the LSE words of all: chosen where that is not asked for,
  // and always with two chunks a lane. Each rank's own affair.
  bool batches_lses = false;
  // Programmatic serialisation, from compute capability 9.0 on: the launch may begin while its
  // predecessor ends. The kernels wait for the predecessor before they read any memory.
  bool overlap_launch = true;
  // Let the launch behind this one onto the chip early, if a half of it is enough for this one.
  // Not where exchanges of other streams need room that a stranger's early launch could take.
  bool invite_next = false;
};

// Fills the geometry that follows from all else in `params`, payload dtype and chunks_per_lane.
void plan_combine(CombineParams& params, CombineLaunch& launch);
cudaError_t launch_a2a_lse_reduce(const CombineParams& params, const CombineLaunch& launch,
                                  cudaStream_t stream);

enum class GatherKernel : int32_t { kPackets = 0, kSlices = 1 };

struct GatherLaunch {
  GatherKernel kernel = GatherKernel::kSlices;
  uint32_t share = 1;
  uint32_t max_blocks = 0;
  bool overlap_launch = true;  // as for the combine
  bool invite_next = false;
};

void plan_slices(GatherParams& params);
cudaError_t launch_gather(const GatherParams& params, const GatherLaunch& launch,
                          cudaStream_t stream);

// Blocks of `kernel` that fit on the current device at once: all but one, or one of `share` parts.
cudaError_t resident_blocks(const void* kernel, uint32_t threads, uint32_t share, uint32_t* blocks);

// Grid, stream and, where asked for and known to the device, programmatic serialisation.
// `attribute` must outlive the launch.
cudaError_t launch_config(uint32_t blocks, uint32_t threads, cudaStream_t stream, bool overlap,
                          cudaLaunchAttribute* attribute, cudaLaunchConfig_t* config);

}  // namespace dcp
