// PTX wrappers, named by what they guarantee. No other file holds inline assembly.
//
// Scopes: `sys` reaches peer GPUs, `gpu` this one. `relaxed` accesses are atomic per element and
// order nothing; a vector access is atomic per element only, so readers check every element.
#pragma once

#include <cstdint>

namespace dcp {

constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

// For what a usual call does not run. Not for anything that has to be fast: parameters that such a
// function reaches by reference are read from memory.
#define DCP_OUT_OF_LINE inline __device__ __noinline__

// Waits for the grids this launch depends on, when it was launched with programmatic
// serialisation; otherwise does nothing. Must precede every read of memory they write.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the launch behind this one, if it is programmatically serialised, take its place on the
// chip once every block has come here. It makes nothing visible: that launch has to wait as above.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Under a condition, without a branch; `v` keeps its value where it does not hold.
__device__ __forceinline__ void ld_relaxed_sys_v4_if(bool condition, const void* address,
                                                     uint4& v) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
      "  @p ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(address), "r"(static_cast<uint32_t>(condition)));
}

__device__ __forceinline__ void st_relaxed_sys_v4_if(bool condition, void* address, uint4 v) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
      "  @p st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"l"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<uint32_t>(condition)));
}

// Two 64-bit elements, each of them atomic.
__device__ __forceinline__ void ld_relaxed_sys_v2_if(bool condition, const void* address,
                                                     ulonglong2& v) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %3, 0;\n"
      "  @p ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2]; }"
      : "+l"(v.x), "+l"(v.y)
      : "l"(address), "r"(static_cast<uint32_t>(condition)));
}

__device__ __forceinline__ void st_relaxed_sys_v2_if(bool condition, void* address, ulonglong2 v) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %3, 0;\n"
      "  @p st.relaxed.sys.global.v2.u64 [%0], {%1, %2}; }" ::"l"(address),
      "l"(v.x), "l"(v.y), "r"(static_cast<uint32_t>(condition)));
}

__device__ __forceinline__ uint64_t ld_relaxed_sys_u64(const void* address) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address));
  return v;
}

__device__ __forceinline__ void st_relaxed_sys_u64(void* address, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v));
}

__device__ __forceinline__ uint64_t ld_acquire_sys_u64(const void* address) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}

// Everything this thread did or observed before is visible to whoever acquires the value.
__device__ __forceinline__ void st_release_sys_u64(void* address, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

__device__ __forceinline__ void st_release_sys_u32(void* address, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

__device__ __forceinline__ uint4 ld_relaxed_gpu_v4(const void* address) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ uint32_t ld_relaxed_gpu_u32(const void* address) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

// Adds without an answer to wait for.
__device__ __forceinline__ void red_add_relaxed_gpu_u64(void* address, uint64_t v) {
  asm volatile("red.add.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

__device__ __forceinline__ uint32_t atom_cas_relaxed_gpu(uint32_t* address, uint32_t expected,
                                                         uint32_t desired) {
  uint32_t old;
  asm volatile("atom.cas.relaxed.gpu.global.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(address), "r"(expected), "r"(desired)
               : "memory");
  return old;
}

// Read-only input and streamed payload: one use, so neither is kept in L1.
__device__ __forceinline__ uint4 ld_stream_v4(const void* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ void ld_stream_v4_if(bool condition, const void* address, uint4& v) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
      "  @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(address), "r"(static_cast<uint32_t>(condition)));
}

__device__ __forceinline__ void st_weak_v4(void* address, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Stores to the same place on every GPU that `address` stands for: a multicast address, which
// devices before compute capability 9.0 do not have.
__device__ __forceinline__ void multimem_st_relaxed_sys_v4(void* address, uint4 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
#endif
}

// Orders this thread's accesses by one address with those by another of the same memory.
__device__ __forceinline__ void fence_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// bar.sync for one warp, bar.arrive (which does not block) for the others of `threads`.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Computes `v` at this point of the program and not later.
__device__ __forceinline__ void evaluate_now(uint64_t v) { asm volatile("" ::"l"(v)); }

// `v`, unknown to the compiler until here, so that nothing that follows from it moves ahead.
__device__ __forceinline__ uint4 not_before_here(uint4 v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
  return v;
}

__device__ __forceinline__ uint64_t globaltimer_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ void sleep_ns(uint32_t ns) {
  asm volatile("nanosleep.u32 %0;" ::"r"(ns));
}

// 1 / x for normal x within an ulp, exact for 1: an estimate and a step of Newton's.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fmaf(y, fmaf(-x, y, 1.0f), y);
}

// 2^x with subnormal results kept; 2 ulp.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace dcp
