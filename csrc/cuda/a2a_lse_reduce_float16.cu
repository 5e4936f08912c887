#include "a2a_lse_reduce_instances.cuh"

namespace dcp {

CombineKernelPointer combine_kernel_float16(const CombineLaunch& launch, uint32_t world_size) {
  return pick_ranks<__half>(launch, world_size);
}

}  // namespace dcp
