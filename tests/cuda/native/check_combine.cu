// Combine against fp64 on the host: random shapes, dtypes, strides, scatter modes, row masks and
// special values, several calls per channel, all ranks running concurrently. Plus the faults: a
// peer that never comes, a peer with another signature, recovery.

#include <chrono>
#include <random>

#include "reference.h"
#include "virtual_ranks.cuh"

using namespace dcp;
using namespace dcp::virtual_ranks;
namespace ref = dcp::reference;

namespace {

int failures = 0;

#define EXPECT(condition, ...)                                            \
  do {                                                                    \
    if (!(condition)) {                                                   \
      if (++failures <= 20) {                                             \
        std::printf("FAILED %s:%d %s: ", __FILE__, __LINE__, #condition); \
        std::printf(__VA_ARGS__);                                         \
        std::printf("\n");                                                \
      }                                                                   \
    }                                                                     \
  } while (0)

struct Case {
  int n, tokens, heads, dim;
  Dtype payload, lse, output;
  bool base_e, masked, with_lse, full_lse, head_major;
  std::string scatter;
  std::vector<uint32_t> splits;
  CombineLaunch launch;
  uint32_t window;
  uint32_t first_epoch;
};

std::string describe(const Case& c) {
  char text[256];
  std::snprintf(text, sizeof text,
                "N=%d T=%d H=%d D=%d payload=%d lse=%d out=%d base_e=%d mask=%d scatter=%s "
                "kernel=%d chunks=%u batches=%d window=%u head_major=%d full=%d",
                c.n, c.tokens, c.heads, c.dim, static_cast<int>(c.payload), static_cast<int>(c.lse),
                static_cast<int>(c.output), c.base_e, c.masked, c.scatter.c_str(),
                static_cast<int>(c.launch.kernel), c.launch.chunks_per_lane, c.launch.batches_lses,
                c.window, c.head_major, c.full_lse);
  return text;
}

template <typename T>
T* upload(const std::vector<T>& host) {
  T* device = nullptr;
  CUDA_CHECK(cudaMalloc(&device, host.size() * sizeof(T) + 16));
  CUDA_CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

// Inputs of one rank for one call.
struct RankInput {
  std::vector<char> partial, lse;  // [T][H] order as the case's strides say
  std::vector<int32_t> seq_lens;
};

int64_t row_index(const Case& c, int t, int h) {
  return c.head_major ? static_cast<int64_t>(h) * c.tokens + t
                      : static_cast<int64_t>(t) * c.heads + h;
}

RankInput random_input(const Case& c, std::mt19937_64& rng, int num_requests) {
  RankInput in;
  const int size = ref::element_size(c.payload), lse_size = ref::element_size(c.lse);
  const int64_t rows = static_cast<int64_t>(c.tokens) * c.heads;
  in.partial.resize(rows * c.dim * size);
  in.lse.resize(rows * lse_size);
  std::normal_distribution<float> normal;
  auto draw = [&](int m) { return static_cast<int>(rng() % m); };
  for (int64_t row = 0; row < rows; ++row) {
    double lse = normal(rng) * 6.0;
    const int kind = draw(10);
    if (kind == 0) lse = ref::kEmpty;
    if (kind == 1) lse = std::numeric_limits<double>::quiet_NaN();
    if (kind == 2) lse = std::numeric_limits<double>::infinity();
    if (kind == 3) lse -= 400.0;  // weight underflows to zero
    ref::encode(in.lse.data() + row * lse_size, c.lse, lse);
    const bool empty =
        ref::clean_lse(ref::decode(in.lse.data() + row * lse_size, c.lse)) == ref::kEmpty;
    const bool with_nan = !empty && draw(40) == 0;
    char* at = in.partial.data() + row * c.dim * size;
    for (int d = 0; d < c.dim; ++d) {
      double v = normal(rng);
      const int special = draw(64);
      if (special == 0) v = -0.0;
      if (special == 1) v = c.payload == Dtype::kFloat16 ? 6e-8 : 1e-39;
      if (special == 2) v = c.payload == Dtype::kFloat16 ? -6e4 : -3e38;
      ref::encode(at + d * size, c.payload, v);
      if (empty || (with_nan && d >= 2 && d < 4)) std::memset(at + d * size, 0xFF, size);
    }
  }
  in.seq_lens.resize(num_requests);
  for (int32_t& length : in.seq_lens) length = draw(4) == 0 ? 0 : 1 + draw(100);
  return in;
}

// Requests of random lengths that leave some padding rows behind.
std::vector<int32_t> random_starts(int tokens, std::mt19937_64& rng) {
  std::vector<int32_t> starts{0};
  const bool uniform = rng() % 2 == 0;
  while (starts.back() < tokens) {
    const int next = starts.back() + (uniform ? 1 : static_cast<int>(rng() % 4));
    if (next > tokens || (rng() % 16 == 0 && starts.size() > 1)) break;
    starts.push_back(next);
  }
  if (starts.size() == 1) starts.push_back(tokens);
  return starts;
}

bool masked_out(const Case& c, const RankInput& in, const std::vector<int32_t>& starts, int t) {
  if (!c.masked) return false;
  for (size_t b = 0; b + 1 < starts.size(); ++b) {
    if (starts[b] <= t && t < starts[b + 1]) return in.seq_lens[b] <= 0;
  }
  return true;
}

void run_case(const Case& c, std::mt19937_64& rng) {
  const int size = ref::element_size(c.payload), out_size = ref::element_size(c.output);
  ScatterMap scatter = scatter_map(c.scatter, c.splits, c.tokens, c.heads);
  uint64_t max_rows = 0;
  for (int r = 0; r < c.n; ++r) max_rows = std::max<uint64_t>(max_rows, scatter.rows[r]);
  const CombineLayout layout(c.n, max_rows + 3, static_cast<uint64_t>(c.dim) * size,
                             static_cast<uint64_t>(c.tokens) * c.heads);
  World world(c.n, layout.sections);
  world.reset(c.first_epoch);
  const std::vector<int32_t> starts = random_starts(c.tokens, rng);
  const int num_requests = static_cast<int>(starts.size()) - 1;
  int32_t* device_starts = upload(starts);

  for (int call = 0; call < 3; ++call) {
    std::vector<RankInput> in;
    std::vector<void*> allocations;
    std::vector<CombineParams> params;
    for (int r = 0; r < c.n; ++r) {
      in.push_back(random_input(c, rng, num_requests));
      CombineParams p = c.launch.kernel == CombineKernel::kTiled ? layout.tiled : layout.lamport;
      p.channel = world.channel(r, Op::kA2aLseReduce, 0xC0FFEE00u);
      p.scatter = scatter;
      p.partial = upload(in[r].partial);
      const int64_t row = static_cast<int64_t>(c.dim) * size;
      p.stride_token = c.head_major ? row : row * c.heads;
      p.stride_head = c.head_major ? row * c.tokens : row;
      p.lse = upload(in[r].lse);
      p.lse_stride_token = c.head_major ? 1 : c.heads;
      p.lse_stride_head = c.head_major ? c.tokens : 1;
      p.lse_dtype = c.lse;
      p.log2_base = c.base_e ? 1.4426950408889634f : 1.0f;
      if (c.masked) {
        p.seq_lens = upload(in[r].seq_lens);
        p.query_start_loc = device_starts;
        p.num_requests = num_requests;
      }
      CUDA_CHECK(cudaMalloc(&p.output, max_rows * c.dim * 4 + 16));
      CUDA_CHECK(cudaMemset(p.output, 0x5A, max_rows * c.dim * 4 + 16));
      CUDA_CHECK(cudaMalloc(&p.lse_output, max_rows * 4 + 16));
      CUDA_CHECK(cudaMalloc(&p.full_lse_output, c.tokens * c.heads * 4 + 16));
      allocations.insert(allocations.end(), {const_cast<char*>(p.partial), const_cast<void*>(p.lse),
                                             p.output, p.lse_output, p.full_lse_output});
      if (c.masked) allocations.push_back(const_cast<int32_t*>(p.seq_lens));
      if (!c.with_lse) p.lse_output = nullptr;
      if (!c.full_lse) p.full_lse_output = nullptr;
      p.output_dtype = c.output;
      p.num_tokens = c.tokens;
      p.num_heads = c.heads;
      p.head_dim = c.dim;
      p.window = c.window;
      params.push_back(p);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int r = 0; r < c.n; ++r) {
      CombineLaunch launch = c.launch;
      launch.share = c.n;
      plan_combine(params[r], launch);
      CUDA_CHECK(launch_a2a_lse_reduce(params[r], launch, world.stream[r]));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    EXPECT(!world.any_fault(), "call %d of %s", call, describe(c).c_str());

    for (int r = 0; r < c.n; ++r) {
      const uint32_t rows = scatter.rows[r];
      std::vector<char> out(rows * static_cast<size_t>(c.dim) * out_size);
      std::vector<float> lse(rows), full(c.full_lse ? c.tokens * c.heads : 0);
      CUDA_CHECK(cudaMemcpy(out.data(), params[r].output, out.size(), cudaMemcpyDeviceToHost));
      if (c.with_lse) {
        CUDA_CHECK(cudaMemcpy(lse.data(), params[r].lse_output, rows * 4, cudaMemcpyDeviceToHost));
      }
      if (c.full_lse) {
        CUDA_CHECK(cudaMemcpy(full.data(), params[r].full_lse_output, full.size() * 4,
                              cudaMemcpyDeviceToHost));
      }
      auto lse_of = [&](int s, int t, int h) {
        if (masked_out(c, in[s], starts, t)) return ref::kEmpty;
        return ref::clean_lse(
            ref::decode(in[s].lse.data() + row_index(c, t, h) * ref::element_size(c.lse), c.lse));
      };
      auto close_lse = [](double got, double want) {
        return got == want || std::fabs(got - want) <= 1e-4 + 1e-5 * std::fabs(want);
      };
      bool ok = true;
      for (uint32_t i = 0; i < rows && ok; ++i) {
        const int t = scatter.first_token[r] + i / scatter.heads[r].d;
        const int h = scatter.first_head[r] + i % scatter.heads[r].d;
        std::vector<const char*> payload;
        std::vector<double> lses;
        int contributing = 0, only = 0;
        for (int s = 0; s < c.n; ++s) {
          payload.push_back(in[s].partial.data() + row_index(c, t, h) * c.dim * size);
          lses.push_back(lse_of(s, t, h));
          if (lses.back() != ref::kEmpty) {
            ++contributing;
            only = s;
          }
        }
        const ref::Merged want = ref::merge(payload, lses, c.payload, c.dim, c.base_e);
        if (c.with_lse && !close_lse(lse[i], want.lse)) {
          EXPECT(false, "lse row %u: %g, expected %g; call %d of %s", i, lse[i], want.lse, call,
                 describe(c).c_str());
          ok = false;
        }
        for (int d = 0; d < c.dim && ok; ++d) {
          const char* at = out.data() + (i * static_cast<size_t>(c.dim) + d) * out_size;
          const double got = ref::decode(at, c.output);
          bool good;
          if (std::isnan(want.output[d])) {
            good = std::isnan(got);
          } else if (contributing == 1 && c.output == c.payload) {
            good = std::memcmp(at, payload[only] + d * size, size) == 0;  // bit for bit
          } else {
            char rounded[8] = {0};
            ref::encode(rounded, c.output, want.output[d]);
            const double nearest = ref::decode(rounded, c.output);
            const double unit = c.output == Dtype::kFloat32   ? 1e-7
                                : c.output == Dtype::kFloat16 ? 1e-3
                                                              : 8e-3;
            const double error = std::fabs(got - want.output[d]);
            good = got == nearest ||
                   error <= unit * std::fabs(want.output[d]) + 3e-6 * want.magnitude + 1e-7;
          }
          if (!good) {
            EXPECT(false, "rank %d row %u dim %d: %g, expected %g; call %d of %s", r, i, d, got,
                   want.output[d], call, describe(c).c_str());
            ok = false;
          }
        }
      }
      for (size_t i = 0; i < full.size() && ok; ++i) {
        std::vector<double> lses;
        std::vector<const char*> payload;
        for (int s = 0; s < c.n; ++s) {
          lses.push_back(lse_of(s, i / c.heads, i % c.heads));
          payload.push_back(nullptr);
        }
        const double want = ref::merge(payload, lses, c.payload, 0, c.base_e).lse;
        if (!close_lse(full[i], want)) {
          EXPECT(false, "full lse %zu: %g, expected %g; %s", i, full[i], want, describe(c).c_str());
          ok = false;
        }
      }
    }
    for (void* pointer : allocations) cudaFree(pointer);
  }
  EXPECT(world.guards_intact(), "guards of %s", describe(c).c_str());
  cudaFree(device_starts);
}

Case random_case(std::mt19937_64& rng) {
  auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + rng() % values.size());
  };
  Case c;
  c.n = pick({2, 3, 4, 5, 6, 7, 8, 11, 16});
  const int per_rank = c.n >= 8 ? pick({1, 2}) : pick({1, 2, 5, 16});
  c.heads = c.n * per_rank;
  c.dim = pick({8, 64, 512, 512, 512, 576, 1024});
  c.tokens = pick({1, 1, 2, 3, 8, 17});
  if (c.n > 8) c.tokens = std::min(c.tokens, 3);
  const Dtype dtypes[3] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16};
  c.payload = dtypes[pick({0, 1, 2, 2})];
  c.output = rng() % 3 ? c.payload : dtypes[rng() % 3];
  c.lse = static_cast<Dtype>(pick({0, 0, 1, 2, 3}));
  c.base_e = rng() % 2;
  c.masked = rng() % 2;
  c.with_lse = rng() % 2;
  c.full_lse = rng() % 3 == 0;
  c.head_major = rng() % 3 == 0;
  const char* modes[3] = {"heads", "tokens", "none"};
  c.scatter = modes[pick({0, 0, 0, 1, 2})];
  c.splits = even_splits(c.heads, c.n);
  if (c.scatter == "tokens") {
    c.tokens = (c.tokens + c.n - 1) / c.n * c.n;
    c.splits = even_splits(c.tokens, c.n);
  }
  if (c.scatter != "none" && rng() % 3 == 0) {  // uneven, possibly nothing for one rank
    const uint32_t moved = rng() % (c.splits[0] + 1);
    c.splits[0] -= moved;
    c.splits[c.n - 1] += moved;
  }
  while (static_cast<int64_t>(c.n) * c.tokens * c.heads * c.dim > 400000 && c.dim > 8) c.dim /= 2;
  c.dim = c.dim / 8 * 8;
  c.launch.kernel = rng() % 3 == 0 ? CombineKernel::kTiled : CombineKernel::kLamport;
  c.launch.payload = c.payload;
  c.launch.chunks_per_lane = pick({0, 1, 2});
  c.launch.batches_lses = rng() % 2;
  c.launch.warps_per_block = pick({0, 1, 2, 4, 8});
  c.launch.max_blocks = pick({0, 0, 2, 3, 7});
  c.launch.overlap_launch = rng() % 2;
  c.launch.invite_next = rng() % 2;
  c.window = pick({0, 1, 4, 1 << 20});
  c.first_epoch = rng() % 4 == 0 ? 0xFFFFFFFEu : kFirstEpoch;  // wraps within the case
  return c;
}

CombineParams small_params(const World& world, const CombineLayout& layout, CombineLaunch& launch,
                           int rank, char* partial, float* lse, char* output, double timeout_s,
                           uint32_t signature) {
  CombineParams p = launch.kernel == CombineKernel::kTiled ? layout.tiled : layout.lamport;
  p.channel = world.channel(rank, Op::kA2aLseReduce, signature, timeout_s);
  p.scatter = scatter_map("heads", even_splits(8, world.size), 4, 8);
  p.partial = partial;
  p.stride_token = 8 * 512 * 2;
  p.stride_head = 512 * 2;
  p.lse = lse;
  p.lse_stride_token = 8;
  p.lse_stride_head = 1;
  p.lse_dtype = Dtype::kFloat32;
  p.log2_base = 1.0f;
  p.output = output;
  p.output_dtype = Dtype::kBFloat16;
  p.num_tokens = 4;
  p.num_heads = 8;
  p.head_dim = 512;
  p.window = 1;
  launch.share = world.size;
  plan_combine(p, launch);
  return p;
}

bool all_nan(const char* device, size_t elements) {
  std::vector<char> host(elements * 2);
  CUDA_CHECK(cudaMemcpy(host.data(), device, host.size(), cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < elements; ++i) {
    if (!std::isnan(ref::decode(host.data() + 2 * i, Dtype::kBFloat16))) return false;
  }
  return true;
}

void check_faults(CombineKernel kernel) {
  const int n = 4;
  const size_t elements = 4 * 2 * 512;
  const CombineLayout layout(n, 8, 1024, 0);
  World world(n, layout.sections);
  CombineLaunch launch;
  launch.kernel = kernel;
  std::vector<char*> partial(n), output(n);
  float* lse = upload(std::vector<float>(32, 0.0f));
  for (int r = 0; r < n; ++r) {
    partial[r] = upload(std::vector<char>(4 * 8 * 512 * 2, 0));
    CUDA_CHECK(cudaMalloc(&output[r], elements * 2));
  }
  auto params = [&](int r, double timeout_s, uint32_t signature) {
    return small_params(world, layout, launch, r, partial[r], lse, output[r], timeout_s, signature);
  };

  // Ranks 2 and 3 never come.
  const auto start = std::chrono::steady_clock::now();
  for (int r = 0; r < 2; ++r) {
    CUDA_CHECK(launch_a2a_lse_reduce(params(r, 0.05, 1), launch, world.stream[r]));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  const double waited =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT(waited > 0.04 && waited < 1.0, "waited %.3f s for a limit of 0.05 s", waited);
  for (int r = 0; r < 2; ++r) {
    const FaultRecord f = *world.fault[r];
    EXPECT(f.state == 1 && f.kind == static_cast<uint32_t>(FaultKind::kTimeout) && f.op == 1 &&
               f.site == 7 && f.rank == static_cast<uint32_t>(r) && f.peer >= 2 && f.peer < 4 &&
               f.epoch_wanted == kFirstEpoch && f.epoch_seen == 0,
           "record: state %u kind %u rank %u peer %u epochs %u %u", f.state, f.kind, f.rank, f.peer,
           f.epoch_wanted, f.epoch_seen);
    EXPECT(all_nan(output[r], elements), "rank %d: rows must be NaN after a timeout", r);
  }
  // A dead workspace answers at once, with NaN.
  CUDA_CHECK(cudaMemset(output[0], 0, elements * 2));
  const auto again = std::chrono::steady_clock::now();
  CUDA_CHECK(launch_a2a_lse_reduce(params(0, 5.0, 1), launch, world.stream[0]));
  CUDA_CHECK(cudaDeviceSynchronize());
  const double second =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - again).count();
  EXPECT(second < 0.5, "a dead workspace took %.3f s", second);
  EXPECT(all_nan(output[0], elements), "a dead workspace must answer NaN");

  // Recovery, then a call with all ranks.
  world.reset();
  for (int r = 0; r < n; ++r) {
    CUDA_CHECK(launch_a2a_lse_reduce(params(r, 2.0, 1), launch, world.stream[r]));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  EXPECT(!world.any_fault(), "after recovery");
  EXPECT(!all_nan(output[0], elements), "after recovery");

  // Rank 3 makes one call more than the others: told apart by the epochs.
  CUDA_CHECK(launch_a2a_lse_reduce(params(3, 0.05, 1), launch, world.stream[3]));
  CUDA_CHECK(cudaDeviceSynchronize());
  EXPECT(world.fault[3]->state == 1 && world.fault[3]->epoch_wanted == kFirstEpoch + 1 &&
             world.fault[3]->epoch_seen == kFirstEpoch,
         "extra call: wanted %u seen %u", world.fault[3]->epoch_wanted, world.fault[3]->epoch_seen);

  // Rank 1 comes with another signature.
  world.reset();
  for (int r = 0; r < n; ++r) {
    CUDA_CHECK(launch_a2a_lse_reduce(params(r, 2.0, r == 1 ? 99 : 1), launch, world.stream[r]));
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  for (int r = 0; r < n; ++r) {
    const FaultRecord f = *world.fault[r];
    EXPECT(f.state == 1 && f.kind == static_cast<uint32_t>(FaultKind::kMismatch) &&
               (r == 1 ? f.signature_seen == 1 : f.peer == 1 && f.signature_seen == 99),
           "mismatch on rank %d: state %u kind %u peer %u seen %u", r, f.state, f.kind, f.peer,
           f.signature_seen);
    EXPECT(all_nan(output[r], elements), "rank %d: rows must be NaN after a mismatch", r);
  }
  EXPECT(world.guards_intact(), "guards after faults");
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  const int cases = argc > 1 ? std::atoi(argv[1]) : 200;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 20251;
  check_faults(CombineKernel::kLamport);
  check_faults(CombineKernel::kTiled);
  std::printf("faults: %d failures\n", failures);
  std::mt19937_64 rng(seed);
  for (int i = 0; i < cases && failures < 20; ++i) run_case(random_case(rng), rng);
  std::printf("check_combine: %s cases=%d failures=%d\n", failures ? "FAILED" : "ok", cases,
              failures);
  return failures ? 1 : 0;
}
