// Launcher of the combine kernels.

#include "a2a_lse_reduce_kernels.h"
#include "launchers.h"

namespace dcp {
namespace {

CombineKernelPointer pick_kernel(const CombineLaunch& launch, uint32_t world_size) {
  switch (launch.payload) {
    case Dtype::kBFloat16:
      return combine_kernel_bfloat16(launch, world_size);
    case Dtype::kFloat16:
      return combine_kernel_float16(launch, world_size);
    case Dtype::kFloat32:
      return combine_kernel_float32(launch, world_size);
    default:
      return nullptr;
  }
}

uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

}  // namespace

void plan_combine(CombineParams& p, CombineLaunch& launch) {
  const uint32_t element = launch.payload == Dtype::kFloat32 ? 4 : 2;
  p.row_chunks = p.head_dim * element / 16;
  uint32_t rows = 0;
  for (uint32_t r = 0; r < p.channel.world_size; ++r) {
    if (p.scatter.rows[r] > rows) rows = p.scatter.rows[r];
  }
  // A function of shape and ranks alone: peers must cut the same units. Two chunks a lane pay once
  // there are more units than fill the chip.
  const bool many = rows * ceil_div(p.row_chunks, 32) > 1024;
  if (launch.kernel == CombineKernel::kTiled || p.channel.world_size > 8) {
    launch.chunks_per_lane = 1;
  } else if (launch.chunks_per_lane == 0) {
    launch.chunks_per_lane = many && p.channel.world_size <= 4 ? 2 : 1;
  }
  launch.batches_lses = launch.batches_lses || many;
  // Units of equal length, so that no warp is left with a sliver of a row.
  const uint32_t units = ceil_div(p.row_chunks, 32 * launch.chunks_per_lane);
  p.unit_chunks = ceil_div(p.row_chunks, units);
  p.units_per_row = FastDiv(units);
  p.num_items = rows * units;
  const ScatterMap& scatter = p.scatter;
  p.stride_rank = scatter.token_step * p.stride_token + scatter.head_step * p.stride_head;
  p.lse_stride_rank =
      scatter.token_step * p.lse_stride_token + scatter.head_step * p.lse_stride_head;
  p.data_slot = p.channel.world_size * p.data_capacity;
  p.lse_slot = p.channel.world_size * p.lse_capacity * 8;
}

cudaError_t launch_a2a_lse_reduce(const CombineParams& p, const CombineLaunch& launch,
                                  cudaStream_t stream) {
  const CombineKernelPointer kernel = pick_kernel(launch, p.channel.world_size);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  uint32_t warps = launch.warps_per_block;
  if (launch.kernel == CombineKernel::kTiled) {
    warps = kTileWarps;
  } else if (warps == 0) {
    // Four warps a block while that leaves no multiprocessor with two blocks.
    const uint32_t share = launch.share == 0 ? 1 : launch.share;
    warps = p.num_items * share <= 512 ? 4 : 8;
  }
  uint32_t resident = 0;
  const cudaError_t error =
      resident_blocks(reinterpret_cast<const void*>(kernel), warps * 32, launch.share, &resident);
  if (error != cudaSuccess) return error;
  const uint32_t half = resident / 2;
  if (launch.max_blocks != 0 && launch.max_blocks < resident) resident = launch.max_blocks;
  if (resident < 2) return cudaErrorCooperativeLaunchTooLarge;
  uint32_t lse_items = 0;
  if (p.full_lse_output != nullptr) lse_items = p.num_tokens * ceil_div(p.num_heads, 32);
  const uint32_t items = p.num_items > lse_items ? p.num_items : lse_items;
  uint32_t blocks =
      ceil_div(items, launch.kernel == CombineKernel::kTiled ? kTileUnits : warps) + 1;
  if (blocks < 2) blocks = 2;
  if (blocks > resident) blocks = resident;
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config;
  const cudaError_t configured =
      launch_config(blocks, warps * 32, stream, launch.overlap_launch, &attribute, &config);
  if (configured != cudaSuccess) return configured;
  CombineParams launched = p;
  launched.channel.invites_next = launch.invite_next && blocks <= half;
  return cudaLaunchKernelEx(&config, kernel, launched);
}

}  // namespace dcp
