#include "a2a_lse_reduce_instances.cuh"

namespace dcp {

CombineKernelPointer combine_kernel_bfloat16(const CombineLaunch& launch, uint32_t world_size) {
  return pick_ranks<__nv_bfloat16>(launch, world_size);
}

}  // namespace dcp
