// Registers the private launch ops of the CUDA runtime, declared in
// dcp_inductor/runtime/cuda_launch_ops.py.
//
// Uses torch's stable ABI only. The Python side has checked shapes, dtypes and alignment; what is
// checked here is what would otherwise corrupt a peer's memory.
#define USE_CUDA  // for the stream's declaration in torch's C shim
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "kv_gather.cuh"
#include "launchers.h"
#include "q_gather.cuh"
#include "tables.h"

#ifndef DCP_INDUCTOR_SOURCES
#define DCP_INDUCTOR_SOURCES "unknown"
#endif
extern "C" __attribute__((used, visibility("default"))) const char dcp_inductor_cuda_sources[] =
    "dcp_inductor CUDA sources:" DCP_INDUCTOR_SOURCES;

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The device of a tensor, current for the length of a launch, and torch's stream on it.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) {
    const int32_t device = tensor.get_device();
    check(cudaGetDevice(&previous_));
    if (device != previous_) check(cudaSetDevice(device));
    switched_ = device != previous_;
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
                    "cannot get the current stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }
  ~OnDevice() {
    if (switched_) cudaSetDevice(previous_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cudaStream_t stream() const { return stream_; }
  static void check(cudaError_t error) {
    STD_TORCH_CHECK(error == cudaSuccess, "launch failed: ", cudaGetErrorString(error));
  }

 private:
  int previous_ = 0;
  bool switched_ = false;
  cudaStream_t stream_ = nullptr;
};

template <typename Table>
const Table& table_of(const Tensor& table) {
  STD_TORCH_CHECK(table.is_cpu() && table.scalar_type() == ScalarType::Long &&
                      table.is_contiguous() &&
                      table.numel() * 8 == static_cast<int64_t>(sizeof(Table)),
                  "table: expected ", sizeof(Table) / 8, " contiguous int64 words on the CPU");
  return *static_cast<const Table*>(table.data_ptr());
}

dcp::Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return dcp::Dtype::kFloat32;
    case ScalarType::BFloat16:
      return dcp::Dtype::kBFloat16;
    case ScalarType::Half:
      return dcp::Dtype::kFloat16;
    default:
      STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Double,
                      "expected a tensor of float32, bfloat16, float16 or float64");
      return dcp::Dtype::kFloat64;
  }
}

// The address of a tensor on the device of `of`: one on another would be read through a mapping
// that may not exist.
template <typename T>
T* pointer(const Tensor& tensor, const Tensor& of) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device() == of.get_device(),
                  "expected all tensors on one GPU");
  return static_cast<T*>(tensor.data_ptr());
}

void check_aligned(const void* address, int64_t bytes) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(address) % 16 == 0 && bytes % 16 == 0,
                  "expected rows at multiples of 16 bytes");
}

dcp::Channel channel_of(const dcp::ChannelTable& t, dcp::Op op) {
  STD_TORCH_CHECK(
      t.world_size >= 1 && t.world_size <= dcp::kMaxRanks && t.rank >= 0 && t.rank < t.world_size,
      "table: expected at most ", dcp::kMaxRanks, " ranks, got ", t.world_size);
  dcp::Channel c{};
  for (int64_t r = 0; r < t.world_size; ++r) {
    c.header[r] = reinterpret_cast<dcp::ChannelHeader*>(t.header[r]);
    c.peer[r] = reinterpret_cast<char*>(t.peer[r]);
  }
  c.own = c.header[t.rank];
  c.multicast = reinterpret_cast<char*>(t.multicast);
  c.fault = reinterpret_cast<dcp::FaultRecord*>(t.fault);
  c.timeout_ns = static_cast<uint64_t>(t.timeout_ns);
  c.rank = static_cast<uint32_t>(t.rank);
  c.world_size = static_cast<uint32_t>(t.world_size);
  c.signature = static_cast<uint32_t>(t.signature);
  c.op = static_cast<uint32_t>(op);
  c.site = static_cast<uint32_t>(t.site);
  return c;
}

dcp::ScatterMap scatter_of(const dcp::CombineTable& t, int64_t tokens, int64_t heads) {
  dcp::ScatterMap m{};
  uint32_t first = 0;
  bool equal = true;
  for (int64_t r = 0; r < t.channel.world_size; ++r) {
    const uint32_t part = static_cast<uint32_t>(t.split[r]);
    equal = equal && t.split[r] == t.split[0];
    if (t.scatter == 0) {
      m.first_head[r] = first;
      m.heads[r] = dcp::FastDiv(part == 0 ? 1 : part);
      m.rows[r] = static_cast<uint32_t>(tokens * part);
    } else {
      m.heads[r] = dcp::FastDiv(static_cast<uint32_t>(heads));
      if (t.scatter == 1) m.first_token[r] = first;
      m.rows[r] = static_cast<uint32_t>((t.scatter == 1 ? part : tokens) * heads);
    }
    if (t.scatter != 2) first += part;
  }
  STD_TORCH_CHECK(t.scatter == 2 || first == (t.scatter == 0 ? heads : tokens),
                  "table: the ranks' parts add up to ", first);
  m.same_tokens = t.scatter == 2 || (t.scatter == 0 && equal);
  dcp::find_steps(m, static_cast<uint32_t>(t.channel.world_size));
  return m;
}

void symm_a2a_lse_reduce(const Tensor& partial_output, const Tensor& partial_lse,
                         std::optional<Tensor> seq_lens, std::optional<Tensor> query_start_loc,
                         const Tensor& output, std::optional<Tensor> lse, bool full_lse,
                         const Tensor& table) {
  const auto& t = table_of<dcp::CombineTable>(table);
  dcp::CombineParams p{};
  p.channel = channel_of(t.channel, dcp::Op::kA2aLseReduce);
  const int64_t tokens = partial_output.size(0), heads = partial_output.size(1);
  p.scatter = scatter_of(t, tokens, heads);
  p.num_tokens = static_cast<uint32_t>(tokens);
  p.num_heads = static_cast<uint32_t>(heads);
  p.head_dim = static_cast<uint32_t>(partial_output.size(2));

  dcp::CombineLaunch launch;
  launch.kernel = static_cast<dcp::CombineKernel>(t.kernel);
  launch.payload = dtype_of(partial_output);
  launch.share = static_cast<uint32_t>(t.channel.share);
  launch.overlap_launch = t.channel.overlap != 0;
  launch.invite_next = launch.overlap_launch && launch.share <= 1;
  const auto element = static_cast<int64_t>(partial_output.element_size());
  p.partial = pointer<const char>(partial_output, partial_output);
  p.stride_token = partial_output.stride(0) * element;
  p.stride_head = partial_output.stride(1) * element;
  STD_TORCH_CHECK(partial_output.stride(2) == 1, "partial_output: expected dense rows");
  check_aligned(p.partial, p.stride_token | p.stride_head | p.head_dim * element);
  p.lse = pointer<const void>(partial_lse, partial_output);
  p.lse_stride_token = partial_lse.stride(0);
  p.lse_stride_head = partial_lse.stride(1);
  p.lse_dtype = dtype_of(partial_lse);
  p.log2_base = t.is_lse_base_on_e ? 1.4426950408889634f : 1.0f;
  if (seq_lens) {
    STD_TORCH_CHECK(query_start_loc && query_start_loc->numel() == seq_lens->numel() + 1 &&
                        seq_lens->scalar_type() == ScalarType::Int && seq_lens->is_contiguous() &&
                        query_start_loc->scalar_type() == ScalarType::Int &&
                        query_start_loc->is_contiguous(),
                    "seq_lens, query_start_loc: expected contiguous int32 [B] and [B + 1]");
    // Without requests every row is padding; the pointer only has to be valid.
    p.query_start_loc = pointer<const int32_t>(*query_start_loc, partial_output);
    p.seq_lens =
        seq_lens->numel() ? pointer<const int32_t>(*seq_lens, partial_output) : p.query_start_loc;
    p.num_requests = static_cast<uint32_t>(seq_lens->numel());
  }
  p.output = pointer<char>(output, partial_output);
  p.output_dtype = dtype_of(output);
  const int64_t my_rows = p.scatter.rows[p.channel.rank];
  STD_TORCH_CHECK(output.is_contiguous() && output.numel() == my_rows * p.head_dim,
                  "output: expected this rank's ", my_rows, " rows");
  if (lse) {
    STD_TORCH_CHECK(lse->is_contiguous() && lse->scalar_type() == ScalarType::Float &&
                        lse->numel() == (full_lse ? tokens * heads : my_rows),
                    "lse: expected contiguous fp32");
    (full_lse ? p.full_lse_output : p.lse_output) = pointer<float>(*lse, partial_output);
  }
  p.data_offset = t.data_offset;
  p.data_capacity = t.data_capacity;
  p.lse_offset = t.lse_offset;
  p.lse_capacity = t.lse_capacity;
  p.flag_offset = t.flag_offset;
  p.flag_capacity = t.flag_capacity;
  p.full_lse_offset = t.full_lse_offset;
  p.full_lse_capacity = t.full_lse_capacity;
  p.window = 1;
  dcp::plan_combine(p, launch);

  const int64_t rows = p.num_items / p.units_per_row.d;
  const bool fits = rows * p.row_chunks * 16 <= t.data_capacity && p.num_items <= t.lse_capacity &&
                    (launch.kernel != dcp::CombineKernel::kTiled ||
                     (p.num_items + dcp::kTileUnits - 1) / dcp::kTileUnits <= t.flag_capacity) &&
                    (p.full_lse_output == nullptr || tokens * heads <= t.full_lse_capacity);
  STD_TORCH_CHECK(fits, "partial_output: more than the workspace holds");
  const OnDevice on(partial_output);
  OnDevice::check(dcp::launch_a2a_lse_reduce(p, launch, on.stream()));
}

// input [T, h, row bytes] as any dtype, rows dense; output [T, padded_heads, row bytes] for the
// query, [N * T, h, row bytes] for KV; not looked at by a launch that only publishes. The output of
// a view is this rank's own part of the channel.
void symm_gather(const Tensor& input, const Tensor& output, const Tensor& table) {
  const auto& t = table_of<dcp::GatherTable>(table);
  dcp::GatherParams p{};
  const auto op = static_cast<dcp::Op>(t.op);
  p.channel = channel_of(t.channel, op);
  const auto element = static_cast<int64_t>(input.element_size());
  const int64_t tokens = input.size(0), heads = input.size(1);
  const int64_t row_bytes = input.size(2) * element;
  STD_TORCH_CHECK(input.size(2) <= 1 || input.stride(2) == 1, "input: expected dense rows");
  p.input = pointer<const char>(input, input);
  p.src_outer_stride = input.stride(0) * element;
  p.src_inner_stride = input.stride(1) * element;
  STD_TORCH_CHECK(t.publish || t.wait, "table: expected a launch that publishes or waits");
  // A launch that only publishes writes no result; the address says that there will be one.
  p.output = t.wait ? pointer<char>(output, input) : pointer<char>(input, input);
  check_aligned(p.input, p.src_outer_stride | p.src_inner_stride | row_bytes);
  check_aligned(p.output, 0);
  if (t.view) {
    STD_TORCH_CHECK(op == dcp::Op::kQGather && t.publish && t.wait &&
                        p.output == p.channel.peer[p.channel.rank] + t.data_offset,
                    "output: expected this rank's part of the workspace");
    p.output = nullptr;
  }
  const int64_t result_rows =
      op == dcp::Op::kQGather ? tokens * t.padded_heads : tokens * heads * t.channel.world_size;
  STD_TORCH_CHECK(!t.wait || (output.is_contiguous() &&
                              output.numel() * static_cast<int64_t>(output.element_size()) ==
                                  result_rows * row_bytes),
                  "output: expected ", result_rows, " rows");
  if (op == dcp::Op::kQGather) {
    STD_TORCH_CHECK(t.padded_heads >= heads * t.channel.world_size, "table: too few heads");
    dcp::plan_q_gather(p, tokens, heads, t.padded_heads, row_bytes);
  } else {
    STD_TORCH_CHECK(heads == 1, "input: expected [t, 1, row]");
    dcp::plan_kv_gather(p, tokens, row_bytes);
  }
  dcp::plan_slices(p);
  p.num_slots = t.view ? 1 : dcp::kNumSlots;
  p.window = 1;
  p.publish = t.publish != 0;
  p.wait = t.wait != 0;
  p.data_offset = t.data_offset;
  p.data_capacity = t.data_capacity;
  p.flag_offset = t.flag_offset;
  p.flag_capacity = t.flag_capacity;
  dcp::GatherLaunch launch;
  launch.kernel = static_cast<dcp::GatherKernel>(t.kernel);
  launch.share = static_cast<uint32_t>(t.channel.share);
  launch.overlap_launch = t.channel.overlap != 0;
  launch.invite_next = launch.overlap_launch && launch.share <= 1;
  const bool packets = launch.kernel == dcp::GatherKernel::kPackets;
  STD_TORCH_CHECK(!packets || (p.publish && p.wait && !t.view),
                  "table: packets go and come in one launch, to fresh memory");
  const int64_t flags =
      packets ? (p.num_chunks + 31) / 32 : (p.num_chunks + p.slice_chunks - 1) / p.slice_chunks;
  const int64_t data = t.view    ? result_rows * row_bytes
                       : packets ? flags * 32 * 32
                                 : static_cast<int64_t>(p.num_chunks) * 16;
  STD_TORCH_CHECK(data <= t.data_capacity && flags <= t.flag_capacity,
                  "input: more than the workspace holds");
  const OnDevice on(input);
  OnDevice::check(dcp::launch_gather(p, launch, on.stream()));
}

int64_t symm_protocol() { return dcp::kCudaProtocol; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dcp_inductor, CUDA, m) {
  m.impl("_symm_a2a_lse_reduce", TORCH_BOX(&symm_a2a_lse_reduce));
  m.impl("_symm_gather", TORCH_BOX(&symm_gather));
}

STABLE_TORCH_LIBRARY_IMPL(dcp_inductor, CompositeExplicitAutograd, m) {
  m.impl("_symm_protocol", TORCH_BOX(&symm_protocol));
}
