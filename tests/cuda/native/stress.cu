// Protocol stress: every rank replays graphs of its own on a stream of its own, so that ranks
// drift against each other; delays inside the kernels; inputs that change with every call (a
// hash of call, source, row and element, so that stale or foreign data cannot pass); graphs of
// several sizes and both kernels over one workspace, odd numbers of calls per graph, eager calls
// in between. Protocols that are wrong on purpose must be caught by the same run.
// Built with DCP_STRESS.

#include <cuda_bf16.h>

#include "stress_run.cuh"

using namespace dcp;
using namespace dcp::virtual_ranks;

namespace {

constexpr int kHeadDim = 512;

// LSE of a row: one in eight is empty (as -inf, NaN or +inf).
__device__ float lse_value(uint32_t call, uint32_t source, uint32_t row) {
  const uint32_t h = mix(mix(call, source + 1), row + 1000003u);
  if ((h & 7u) == 0) {
    return h & 8u ? -__builtin_inff() : h & 16u ? __builtin_nanf("") : __builtin_inff();
  }
  return static_cast<float>(h >> 16) * (12.0f / 65536.0f) - 6.0f;
}

__device__ uint16_t payload_value(uint32_t call, uint32_t source, uint32_t row, uint32_t d) {
  const uint32_t h = mix(mix(call, source + 1), row * kHeadDim + d);
  if ((h & 63u) == 0) return 0x8000u;                         // -0
  if ((h & 63u) == 1) return 1u + (h >> 28);                  // denormal
  return static_cast<uint16_t>(h >> 16 & 0x80FFu) | 0x3F00u;  // +-[0.5, 1)... (1, 2)
}

__global__ void generate(RankState* state, uint32_t ahead, uint32_t rank, uint32_t rows,
                         uint4* partial, float* lse) {
  const uint32_t call = state->call + ahead;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * 64;
       i += gridDim.x * blockDim.x) {
    const uint32_t row = i / 64, d = i % 64 * 8;
    const float l = lse_value(call, rank, row);
    uint32_t words[4];
    for (int w = 0; w < 4; ++w) {
      words[w] = payload_value(call, rank, row, d + 2 * w) |
                 static_cast<uint32_t>(payload_value(call, rank, row, d + 2 * w + 1)) << 16;
      if (!(l < __builtin_inff()) || l == -__builtin_inff()) words[w] = 0xFFFFFFFFu;
    }
    partial[i] = make_uint4(words[0], words[1], words[2], words[3]);
    if (d == 0) lse[row] = l;
  }
}

// Recomputes what every source sent; one warp per output row.
__global__ void verify(RankState* state, uint32_t ahead, uint32_t rank, uint32_t n, uint32_t tokens,
                       uint32_t heads, const uint16_t* output, const float* merged_lse) {
  const uint32_t call = state->call + ahead;
  const uint32_t h = heads / n, lane = threadIdx.x % 32;
  const uint32_t warps = gridDim.x * blockDim.x / 32;
  for (uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < tokens * h; i += warps) {
    const uint32_t row = i / h * heads + rank * h + i % h;
    float lse[kMaxRanks], highest = -__builtin_inff();
    uint32_t contributing = 0, only = 0;
    for (uint32_t s = 0; s < n; ++s) {
      lse[s] = lse_value(call, s, row);
      if (!(lse[s] < __builtin_inff())) lse[s] = -__builtin_inff();
      if (lse[s] != -__builtin_inff()) {
        ++contributing;
        only = s;
      }
      highest = fmaxf(highest, lse[s]);
    }
    double sum = 0.0;
    for (uint32_t s = 0; s < n; ++s) {
      if (lse[s] != -__builtin_inff()) sum += exp2(static_cast<double>(lse[s] - highest));
    }
    for (uint32_t d = lane; d < kHeadDim; d += 32) {
      const uint16_t bits = output[i * static_cast<size_t>(kHeadDim) + d];
      const float got = __uint_as_float(static_cast<uint32_t>(bits) << 16);
      double want = 0.0;
      for (uint32_t s = 0; s < n; ++s) {
        if (lse[s] == -__builtin_inff()) continue;
        const float v =
            __uint_as_float(static_cast<uint32_t>(payload_value(call, s, row, d)) << 16);
        want += exp2(static_cast<double>(lse[s] - highest)) / sum * v;
      }
      const bool good = contributing == 1 ? bits == payload_value(call, only, row, d)
                                          : fabs(got - want) <= 8e-3 * fabs(want) + 1e-5;
      if (!good && atomicAdd(&state->errors, 1ull) == 0) {
        state->first_error[0] = call;
        state->first_error[1] = i;
        state->first_error[2] = d;
        state->first_error[3] = __float_as_uint(got);
        state->first_error[4] = __float_as_uint(static_cast<float>(want));
      }
    }
    const float want_lse =
        contributing == 0 ? -__builtin_inff() : static_cast<float>(highest + log2(sum));
    if (lane == 0 && merged_lse[i] != want_lse && !(fabsf(merged_lse[i] - want_lse) < 1e-4f)) {
      atomicAdd(&state->errors, 1ull);
    }
  }
}

struct Config {
  const char* name;
  int n;
  std::vector<int> tokens;  // sizes below `tiled_from` use the marked words, others the tiles
  int tiled_from;
  int heads;
  int calls_per_graph;
  int replays;
  uint32_t max_delay_ns;
  Variant variant;
  int chain = 1;         // launches in a row, which then overlap
  bool batched = false;  // as with many units: one warp of a block stores the LSEs of all
};

class Run {
 public:
  explicit Run(const Config& config)
      : c_(config),
        layout_(c_.n, max_tokens() * (c_.heads / c_.n), kHeadDim * 2, 0),
        world_(c_.n, layout_.sections) {
    const size_t rows = this->rows() * c_.chain;
    for (int r = 0; r < c_.n; ++r) {
      state_[r] = new_state();
      CUDA_CHECK(cudaMalloc(&partial_[r], rows * kHeadDim * 2));
      CUDA_CHECK(cudaMalloc(&lse_[r], rows * 4));
      CUDA_CHECK(cudaMalloc(&output_[r], rows / c_.n * kHeadDim * 2));
      CUDA_CHECK(cudaMalloc(&merged_lse_[r], rows / c_.n * 4));
    }
  }
  ~Run() {
    for (int r = 0; r < c_.n; ++r) {
      cudaFree(state_[r]);
      cudaFree(partial_[r]);
      cudaFree(lse_[r]);
      cudaFree(output_[r]);
      cudaFree(merged_lse_[r]);
    }
  }

  Outcome go() {
    const bool correct = c_.variant == Variant::kCorrect;
    Outcome outcome = replay(
        world_, state_, {c_.tokens.size(), c_.calls_per_graph, c_.chain, c_.replays, correct},
        [this](int r, size_t kind, int step) { enqueue(r, c_.tokens[kind], step & 1); });
    for (int r = 0; r < c_.n && correct; ++r) {
      const RankState& s = outcome.states[r];
      if (s.errors == 0) continue;
      std::printf("  rank %d: %llu errors, first: call %u row %u dim %u got %g want %g\n", r,
                  s.errors, s.first_error[0], s.first_error[1], s.first_error[2],
                  *reinterpret_cast<const float*>(&s.first_error[3]),
                  *reinterpret_cast<const float*>(&s.first_error[4]));
    }
    if (outcome.faulted || outcome.errors > 0) return outcome;
    if (!world_.guards_intact()) {
      std::printf("  bytes beside the sections have changed\n");
      outcome.errors = 1;
    }
    if (correct && !all_armed()) {
      std::printf("  words are left that are not armed\n");
      outcome.errors = 1;
    }
    return outcome;
  }

 private:
  int max_tokens() const {
    int most = 0;
    for (int t : c_.tokens) most = t > most ? t : most;
    return most;
  }

  // Whether every marked word and LSE word of both slots says again "not arrived": who reads a
  // word re-arms it, and what nobody reads was never sent.
  bool all_armed() const {
    const CombineParams& p = layout_.lamport;
    const uint64_t regions = static_cast<uint64_t>(kNumSlots) * c_.n;
    return world_.all_bytes(p.data_offset, regions * p.data_capacity, 0xFF) &&
           world_.all_bytes(p.lse_offset, regions * p.lse_capacity * 8, 0xFF);
  }

  // Most rows of a rank's partial output.
  size_t rows() const { return static_cast<size_t>(max_tokens()) * c_.heads; }

  // The calls of one step: all inputs, all launches, all checks.
  void enqueue(int r, int tokens, uint32_t host_slot) {
    const cudaStream_t stream = world_.stream[r];
    const size_t merged_rows = rows() / c_.n;
    for (int k = 0; k < c_.chain; ++k) {
      generate<<<8, 128, 0, stream>>>(
          state_[r], k, r, tokens * c_.heads,
          reinterpret_cast<uint4*>(partial_[r] + k * rows() * kHeadDim * 2), lse_[r] + k * rows());
    }
    for (int k = 0; k < c_.chain; ++k) combine(r, tokens, host_slot, k);
    for (int k = 0; k < c_.chain; ++k) {
      verify<<<8, 128, 0, stream>>>(
          state_[r], k, r, c_.n, tokens, c_.heads,
          reinterpret_cast<const uint16_t*>(output_[r] + k * merged_rows * kHeadDim * 2),
          merged_lse_[r] + k * merged_rows);
    }
    next_calls<<<1, 1, 0, stream>>>(state_[r], c_.chain);
    CUDA_CHECK(cudaGetLastError());
  }

  void combine(int r, int tokens, uint32_t host_slot, int k) {
    CombineLaunch launch;
    launch.kernel = tokens >= c_.tiled_from ? CombineKernel::kTiled : CombineKernel::kLamport;
    launch.share = 2 * c_.n;  // room for the other kernels of the test
    launch.invite_next = true;
    launch.batches_lses = c_.batched;
    if (c_.batched && c_.n <= 4) launch.chunks_per_lane = 2;
    CombineParams p = launch.kernel == CombineKernel::kTiled ? layout_.tiled : layout_.lamport;
    p.channel = world_.channel(r, Op::kA2aLseReduce, 0x1000u + tokens,
                               c_.variant == Variant::kCorrect ? 20.0 : 0.2);
    p.channel.stress = {c_.variant, host_slot, 77u, c_.max_delay_ns};
    p.scatter = scatter_map("heads", even_splits(c_.heads, c_.n), tokens, c_.heads);
    p.partial = partial_[r] + k * rows() * kHeadDim * 2;
    p.stride_token = static_cast<int64_t>(c_.heads) * kHeadDim * 2;
    p.stride_head = kHeadDim * 2;
    p.lse = lse_[r] + k * rows();
    p.lse_stride_token = c_.heads;
    p.lse_stride_head = 1;
    p.lse_dtype = Dtype::kFloat32;
    p.log2_base = 1.0f;
    p.output = output_[r] + k * (rows() / c_.n) * kHeadDim * 2;
    p.output_dtype = Dtype::kBFloat16;
    p.lse_output = merged_lse_[r] + k * (rows() / c_.n);
    p.num_tokens = tokens;
    p.num_heads = c_.heads;
    p.head_dim = kHeadDim;
    p.window = 1;
    plan_combine(p, launch);
    CUDA_CHECK(launch_a2a_lse_reduce(p, launch, world_.stream[r]));
  }

  Config c_;
  CombineLayout layout_;
  World world_;
  RankState* state_[kMaxRanks];
  char *partial_[kMaxRanks], *output_[kMaxRanks];
  float *lse_[kMaxRanks], *merged_lse_[kMaxRanks];
};

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  const int scale = argc > 1 ? std::atoi(argv[1]) : 10000;  // replays of the long runs
  const Variant kCorrect = Variant::kCorrect;
  const std::vector<Config> configs = {
      {"N=2 T=1 undelayed", 2, {1}, 99, 16, 3, scale, 0, kCorrect},
      {"N=2 T=1,3 delays", 2, {1, 3}, 99, 16, 3, scale / 2, 3000, kCorrect},
      {"N=4 T=1,3,8 delays", 4, {1, 3, 8}, 99, 16, 3, scale / 2, 3000, kCorrect},
      {"N=8 T=1,4 delays", 8, {1, 4}, 99, 32, 3, scale / 4, 3000, kCorrect},
      {"N=4 T=1,5,24 both kernels", 4, {1, 5, 24}, 5, 16, 3, scale / 4, 3000, kCorrect},
      {"N=8 T=8,32 tiled", 8, {8, 32}, 1, 32, 3, scale / 8, 3000, kCorrect},
      {"N=2 T=1,3 in a row", 2, {1, 3}, 99, 16, 3, scale / 2, 3000, kCorrect, 3},
      {"N=4 T=1,5,24 in a row", 4, {1, 5, 24}, 5, 16, 3, scale / 4, 3000, kCorrect, 2},
      {"N=2 T=1,3 batched LSEs", 2, {1, 3}, 99, 16, 3, scale / 2, 3000, kCorrect, 1, true},
      {"N=4 T=1,5 batched in a row", 4, {1, 5}, 99, 16, 3, scale / 4, 3000, kCorrect, 2, true},
      {"N=8 T=1,4 batched LSEs", 8, {1, 4}, 99, 32, 3, scale / 4, 3000, kCorrect, 1, true},
      {"control: one slot", 4, {1, 3}, 99, 16, 3, scale, 40000, Variant::kOneSlot},
      {"control: one slot, tiled", 4, {8}, 1, 16, 3, scale, 40000, Variant::kOneSlot},
      {"control: host parity", 4, {1, 3}, 99, 16, 3, scale, 40000, Variant::kHostParity},
      {"control: deferred clear", 4, {3}, 99, 16, 3, scale, 40000, Variant::kDeferredClear},
      {"control: one slot in a row", 4, {1, 3}, 99, 16, 3, scale, 40000, Variant::kOneSlot, 3},
  };
  int failures = 0;
  for (const Config& config : configs) {
    const Outcome o = Run(config).go();
    if (!report(config.name, o, config.variant == kCorrect)) ++failures;
  }
  std::printf("stress: %s\n", failures ? "FAILED" : "ok");
  return failures ? 1 : 0;
}
