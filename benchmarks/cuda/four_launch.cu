// The four-launch combine for the ranks of real processes, as a library that Python loads:
// bf16 [T, H, D], fp32 LSE, heads split evenly.
#include "a2a_lse_reduce_kernels.h"
#include "four_launch.cuh"
#include "tables.h"

namespace dcp {

// The planner shares a file with the launcher of the fused kernels, which is not used here.
CombineKernelPointer combine_kernel_bfloat16(const CombineLaunch&, uint32_t) { return nullptr; }
CombineKernelPointer combine_kernel_float16(const CombineLaunch&, uint32_t) { return nullptr; }
CombineKernelPointer combine_kernel_float32(const CombineLaunch&, uint32_t) { return nullptr; }

}  // namespace dcp

// `table` is a CombineTable; the tensors are contiguous. Returns CUDA's error.
extern "C" int four_launch_combine(const int64_t* table, const void* partial, const void* lse,
                                   void* output, uint32_t tokens, uint32_t heads, uint32_t head_dim,
                                   void* stream) {
  const auto& t = *reinterpret_cast<const dcp::CombineTable*>(table);
  dcp::CombineParams p{};
  for (int64_t r = 0; r < t.channel.world_size; ++r) {
    p.channel.header[r] = reinterpret_cast<dcp::ChannelHeader*>(t.channel.header[r]);
    p.channel.peer[r] = reinterpret_cast<char*>(t.channel.peer[r]);
    const uint32_t part = heads / static_cast<uint32_t>(t.channel.world_size);
    p.scatter.first_head[r] = static_cast<uint32_t>(r) * part;
    p.scatter.heads[r] = dcp::FastDiv(part);
    p.scatter.rows[r] = tokens * part;
  }
  p.channel.own = p.channel.header[t.channel.rank];
  p.channel.fault = reinterpret_cast<dcp::FaultRecord*>(t.channel.fault);
  p.channel.timeout_ns = static_cast<uint64_t>(t.channel.timeout_ns);
  p.channel.rank = static_cast<uint32_t>(t.channel.rank);
  p.channel.world_size = static_cast<uint32_t>(t.channel.world_size);
  p.channel.signature = static_cast<uint32_t>(t.channel.signature);
  p.channel.op = static_cast<uint32_t>(dcp::Op::kA2aLseReduce);
  p.scatter.same_tokens = 1;
  dcp::find_steps(p.scatter, p.channel.world_size);

  p.partial = static_cast<const char*>(partial);
  p.stride_token = static_cast<int64_t>(heads) * head_dim * 2;
  p.stride_head = static_cast<int64_t>(head_dim) * 2;
  p.lse = lse;
  p.lse_stride_token = heads;
  p.lse_stride_head = 1;
  p.lse_dtype = dcp::Dtype::kFloat32;
  p.log2_base = 1.4426950408889634f;
  p.output = static_cast<char*>(output);
  p.output_dtype = dcp::Dtype::kBFloat16;
  p.num_tokens = tokens;
  p.num_heads = heads;
  p.head_dim = head_dim;
  p.data_offset = static_cast<uint64_t>(t.data_offset);
  p.data_capacity = static_cast<uint64_t>(t.data_capacity);
  p.lse_offset = static_cast<uint64_t>(t.lse_offset);
  p.lse_capacity = static_cast<uint64_t>(t.lse_capacity);
  p.flag_offset = static_cast<uint64_t>(t.flag_offset);
  p.flag_capacity = static_cast<uint64_t>(t.flag_capacity);
  dcp::CombineLaunch launch;
  launch.kernel = dcp::CombineKernel::kTiled;
  dcp::plan_combine(p, launch);
  dcp::baseline::launch(p, 1, 4, static_cast<cudaStream_t>(stream));
  return static_cast<int>(cudaGetLastError());
}
