#include "a2a_lse_reduce_instances.cuh"

namespace dcp {

CombineKernelPointer combine_kernel_float32(const CombineLaunch& launch, uint32_t world_size) {
  return pick_ranks<float>(launch, world_size);
}

}  // namespace dcp
