// The combine kernel for a payload dtype, one function per dtype so that each compiles alone.
#pragma once

#include "launchers.h"

namespace dcp {

using CombineKernelPointer = void (*)(const CombineParams);

CombineKernelPointer combine_kernel_bfloat16(const CombineLaunch& launch, uint32_t world_size);
CombineKernelPointer combine_kernel_float16(const CombineLaunch& launch, uint32_t world_size);
CombineKernelPointer combine_kernel_float32(const CombineLaunch& launch, uint32_t world_size);

}  // namespace dcp
