// Registers the private launch ops of the CPU runtime, declared in dcp_inductor/launch_ops.py.
//
// Uses torch's stable ABI only, so one binary serves every supported torch. The Python side has
// checked shapes and dtypes; what is checked here is what would otherwise corrupt memory.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <vector>

#include "exchange.h"

// Read by dcp_inductor/extension.py from the file, before it loads a library that was built
// earlier.
#ifndef DCP_INDUCTOR_SOURCES
#define DCP_INDUCTOR_SOURCES "unknown"
#endif
extern "C" __attribute__((used, visibility("default"))) const char dcp_inductor_sources[] =
    "dcp_inductor sources:" DCP_INDUCTOR_SOURCES;

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

const dcp::Table& table_of(const Tensor& table) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Long && table.is_contiguous(),
                  "table: expected contiguous int64 words");
  const auto& view = *static_cast<const dcp::Table*>(table.data_ptr());
  STD_TORCH_CHECK(view.world_size >= 1 && view.world_size <= dcp::kMaxRanks &&
                      table.numel() == 5 + 2 * view.world_size,
                  "table: expected 5 + 2 * world_size words, got ", table.numel());
  return view;
}

const unsigned char* signature_of(const Tensor& signature) {
  STD_TORCH_CHECK(signature.numel() == dcp::kSignatureBytes && signature.element_size() == 1,
                  "signature: expected ", dcp::kSignatureBytes, " bytes, got ", signature.numel());
  return static_cast<const unsigned char*>(signature.data_ptr());
}

dcp::Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return dcp::kFloat32;
    case ScalarType::BFloat16:
      return dcp::kBFloat16;
    case ScalarType::Half:
      return dcp::kFloat16;
    default:
      STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Double,
                      "expected a tensor of float32, bfloat16, float16 or float64");
      return dcp::kFloat64;
  }
}

unsigned char* bytes_of(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_cpu(), "expected a tensor on the CPU");
  return static_cast<unsigned char*>(tensor.data_ptr());
}

int64_t shm_agree(const Tensor& table, const Tensor& signature, bool compare, bool resume) {
  return dcp::agree(table_of(table), signature_of(signature), compare, resume);
}

int64_t shm_gather(const Tensor& input, const Tensor& output, const Tensor& table,
                   const Tensor& signature, int64_t rank_stride, int64_t token_stride,
                   bool resume) {
  const dcp::Table& view = table_of(table);
  const auto size = static_cast<int64_t>(input.element_size());
  STD_TORCH_CHECK(input.dim() == 3 && (input.size(2) <= 1 || input.stride(2) == 1),
                  "input: expected [tokens, heads, D] with dense rows");
  STD_TORCH_CHECK(output.is_contiguous(), "output: expected a contiguous tensor");
  const dcp::Gather gather{
      bytes_of(input),      input.size(0),          input.size(1),
      input.size(2) * size, input.stride(0) * size, input.stride(1) * size,
      bytes_of(output),     rank_stride * size,     token_stride * size,
  };
  STD_TORCH_CHECK(gather.tokens * gather.heads * gather.row_bytes <= view.slot_bytes,
                  "input: more bytes than the ", view.slot_bytes, " of a slot");
  return dcp::gather(view, signature_of(signature), gather, resume);
}

dcp::Ints ints_of(const std::optional<Tensor>& tensor) {
  if (!tensor) return {nullptr, false};
  STD_TORCH_CHECK(tensor->is_contiguous() && (tensor->scalar_type() == ScalarType::Int ||
                                              tensor->scalar_type() == ScalarType::Long),
                  "expected contiguous int32 or int64 lengths");
  return {tensor->data_ptr(), tensor->scalar_type() == ScalarType::Long};
}

// part: first and last + 1 token, first and last + 1 head of this rank's result.
int64_t shm_a2a_lse_reduce(const Tensor& partial_output, const Tensor& partial_lse,
                           std::optional<Tensor> seq_lens, std::optional<Tensor> query_start_loc,
                           const Tensor& output, std::optional<Tensor> lse, const Tensor& table,
                           const Tensor& signature, std::vector<int64_t> part,
                           bool every_rank_takes_all, bool is_lse_base_on_e, bool full_lse,
                           bool resume) {
  const dcp::Table& view = table_of(table);
  dcp::Combine c{};
  c.partial_output = bytes_of(partial_output);
  c.dtype = dtype_of(partial_output);
  STD_TORCH_CHECK(c.dtype != dcp::kFloat64, "partial_output: expected at most 32 bits per element");
  c.tokens = partial_output.size(0);
  c.heads = partial_output.size(1);
  c.head_dim = partial_output.size(2);
  STD_TORCH_CHECK(c.head_dim <= 1 || partial_output.stride(2) == 1,
                  "partial_output: expected dense rows");
  c.token_stride = partial_output.stride(0) * c.element();
  c.head_stride = partial_output.stride(1) * c.element();
  c.partial_lse = bytes_of(partial_lse);
  c.lse_dtype = dtype_of(partial_lse);
  const auto lse_size = static_cast<int64_t>(partial_lse.element_size());
  c.lse_token_stride = partial_lse.stride(0) * lse_size;
  c.lse_head_stride = partial_lse.stride(1) * lse_size;
  STD_TORCH_CHECK(part.size() == 4, "part: expected 4 bounds, got ", part.size());
  c.first_token = part[0];
  c.last_token = part[1];
  c.first_head = part[2];
  c.last_head = part[3];
  c.every_rank_takes_all = every_rank_takes_all;
  c.is_lse_base_on_e = is_lse_base_on_e;
  c.sequences = seq_lens ? static_cast<int64_t>(seq_lens->numel()) : -1;
  c.seq_lens = ints_of(seq_lens);
  c.query_start_loc = ints_of(query_start_loc);
  STD_TORCH_CHECK(!seq_lens || (query_start_loc && query_start_loc->numel() == c.sequences + 1),
                  "query_start_loc: expected one entry more than seq_lens");
  c.output = bytes_of(output);
  c.output_dtype = dtype_of(output);
  STD_TORCH_CHECK(output.is_contiguous() && c.output_dtype != dcp::kFloat64 &&
                      output.numel() == (c.last_token - c.first_token) *
                                            (c.last_head - c.first_head) * c.head_dim,
                  "output: expected a contiguous tensor of this rank's part");
  c.full_lse = full_lse;
  if (lse) {
    STD_TORCH_CHECK(lse->is_contiguous() && lse->scalar_type() == ScalarType::Float,
                    "lse: expected contiguous fp32");
    c.lse = static_cast<float*>(lse->data_ptr());
  }
  STD_TORCH_CHECK(c.lse_offset() + c.tokens * c.heads * 4 <= view.slot_bytes,
                  "partial_output: more bytes than the ", view.slot_bytes, " of a slot");
  return dcp::combine(view, signature_of(signature), c, resume);
}

int64_t shm_protocol() { return dcp::kProtocol; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(dcp_inductor, CPU, m) {
  m.impl("_shm_agree", TORCH_BOX(&shm_agree));
  m.impl("_shm_gather", TORCH_BOX(&shm_gather));
  m.impl("_shm_a2a_lse_reduce", TORCH_BOX(&shm_a2a_lse_reduce));
}

STABLE_TORCH_LIBRARY_IMPL(dcp_inductor, CompositeExplicitAutograd, m) {
  m.impl("_shm_protocol", TORCH_BOX(&shm_protocol));
}
