// Times the combine in every way.
#pragma once

#include <tuple>

#include "four_launch.cuh"
#include "timing.cuh"

namespace dcp::bench {

// Elements of `a` and `b` that differ by more than rounding.
__global__ void count_differences(const __nv_bfloat16* a, const __nv_bfloat16* b, size_t count,
                                  unsigned long long* differences) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const float x = __bfloat162float(a[i]), y = __bfloat162float(b[i]);
    if (!(fabsf(x - y) <= 0.008f * fabsf(y) + 1e-6f)) atomicAdd(differences, 1ull);
  }
}

struct CombineVariant {
  std::string name;
  bool baseline;
  CombineLaunch launch;
  uint32_t window;
  uint32_t tokens_per_request = 0;  // 0: without lengths, hence without row masks
};

__global__ void fill_requests(int32_t* lengths, int32_t* starts, int count, int step) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    lengths[i] = 1 + i;
    starts[i] = i * step;
  }
}

class CombineBench {
 public:
  CombineBench(int n, int max_tokens, int heads)
      : n_(n),
        heads_(heads),
        layout_(n, static_cast<uint64_t>(max_tokens) * (heads / n), kHeadDim * 2, 0),
        world_(n, layout_.sections) {
    const size_t elements = static_cast<size_t>(max_tokens) * heads * kHeadDim;
    for (int r = 0; r < n; ++r) {
      CUDA_CHECK(cudaMalloc(&partial_[r], elements * 2));
      CUDA_CHECK(cudaMalloc(&lse_[r], elements / kHeadDim * 4));
      CUDA_CHECK(cudaMalloc(&output_[r], elements / n * 2));
      CUDA_CHECK(cudaMalloc(&expected_[r], elements / n * 2));
      fill_random<<<1024, 256>>>(reinterpret_cast<uint32_t*>(partial_[r]), elements / 2, 11 + r,
                                 false);
      fill_random<<<64, 256>>>(reinterpret_cast<uint32_t*>(lse_[r]), elements / kHeadDim, 91 + r,
                               true);
    }
    CUDA_CHECK(cudaMalloc(&differences_, 8));
    for (int step : {1, 2}) {
      CUDA_CHECK(cudaMalloc(&lengths_[step], (max_tokens + 1) * 4));
      CUDA_CHECK(cudaMalloc(&starts_[step], (max_tokens + 1) * 4));
      fill_requests<<<1, 256>>>(lengths_[step], starts_[step], max_tokens + 1, step);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  ~CombineBench() {
    for (int r = 0; r < n_; ++r) {
      cudaFree(partial_[r]);
      cudaFree(lse_[r]);
      cudaFree(output_[r]);
      cudaFree(expected_[r]);
    }
    cudaFree(differences_);
    for (int step : {1, 2}) {
      cudaFree(lengths_[step]);
      cudaFree(starts_[step]);
    }
  }

  static double bytes_per_rank(int n, int tokens, int heads) {
    // read the input, write and read back what travels, write the result
    const double input = static_cast<double>(tokens) * heads * kHeadDim * 2;
    return input + 2 * input * (n - 1) / n + input / n;
  }

  double time(int tokens, const CombineVariant& v) {
    world_.reset();
    const double us =
        time_per_call(n_, world_.stream, [&](int r, cudaStream_t s) { enqueue(r, s, tokens, v); });
    if (world_.any_fault()) return -1.0;
    if (!matches(tokens, v)) return -2.0;
    return us;
  }

 private:
  void enqueue(int r, cudaStream_t stream, int tokens, const CombineVariant& v) {
    CombineLaunch launch = v.launch;
    launch.share = n_;
    launch.invite_next &= !v.baseline;
    const bool tiled = v.baseline || launch.kernel == CombineKernel::kTiled;
    CombineParams p = tiled ? layout_.tiled : layout_.lamport;
    p.channel = world_.channel(r, Op::kA2aLseReduce, 0x2000u + tokens);
    p.scatter = scatter_map("heads", even_splits(heads_, n_), tokens, heads_);
    p.partial = partial_[r];
    p.stride_token = static_cast<int64_t>(heads_) * kHeadDim * 2;
    p.stride_head = kHeadDim * 2;
    p.lse = lse_[r];
    p.lse_stride_token = heads_;
    p.lse_stride_head = 1;
    p.lse_dtype = Dtype::kFloat32;
    p.log2_base = 1.4426950408889634f;
    p.output = output_[r];
    p.output_dtype = Dtype::kBFloat16;
    p.num_tokens = tokens;
    p.num_heads = heads_;
    p.head_dim = kHeadDim;
    p.window = v.window;
    if (v.tokens_per_request != 0) {
      p.seq_lens = lengths_[v.tokens_per_request];
      p.query_start_loc = starts_[v.tokens_per_request];
      p.num_requests = (tokens + v.tokens_per_request - 1) / v.tokens_per_request;
    }
    plan_combine(p, launch);
    if (v.baseline) {
      baseline::launch(p, n_, launch.warps_per_block ? launch.warps_per_block : 4, stream);
      CUDA_CHECK(cudaGetLastError());
    } else {
      CUDA_CHECK(launch_a2a_lse_reduce(p, launch, stream));
    }
  }

  // Whether every variant leaves the result of the first one.
  bool matches(int tokens, const CombineVariant& v) {
    const size_t elements = static_cast<size_t>(tokens) * heads_ / n_ * kHeadDim;
    for (int r = 0; r < n_; ++r) {
      CUDA_CHECK(cudaMemset(output_[r], 0xFF, elements * 2));
      CUDA_CHECK(cudaDeviceSynchronize());
    }
    for (int r = 0; r < n_; ++r) enqueue(r, world_.stream[r], tokens, v);
    CUDA_CHECK(cudaDeviceSynchronize());
    bool same = true;
    for (int r = 0; r < n_; ++r) {
      if (v.baseline) {
        CUDA_CHECK(cudaMemcpy(expected_[r], output_[r], elements * 2, cudaMemcpyDeviceToDevice));
        continue;
      }
      unsigned long long count = 0;
      CUDA_CHECK(cudaMemset(differences_, 0, 8));
      count_differences<<<256, 256>>>(reinterpret_cast<const __nv_bfloat16*>(output_[r]),
                                      reinterpret_cast<const __nv_bfloat16*>(expected_[r]),
                                      elements, differences_);
      CUDA_CHECK(cudaMemcpy(&count, differences_, 8, cudaMemcpyDeviceToHost));
      same = same && count == 0;
    }
    return same;
  }

  int n_, heads_;
  CombineLayout layout_;
  World world_;
  char *partial_[kMaxRanks], *lse_[kMaxRanks], *output_[kMaxRanks], *expected_[kMaxRanks];
  unsigned long long* differences_;
  int32_t *lengths_[3], *starts_[3];  // by tokens of a request; 1 and 2 exist
};

inline std::vector<CombineVariant> combine_variants(bool sweep, int tokens) {
  std::vector<CombineVariant> variants;
  auto add = [&](const std::string& name, bool baseline, CombineKernel kernel, uint32_t chunks,
                 uint32_t warps, uint32_t window) {
    CombineLaunch launch;
    launch.kernel = kernel;
    launch.chunks_per_lane = chunks;
    launch.warps_per_block = warps;
    launch.invite_next = true;  // as between ranks with a GPU each
    variants.push_back({name, baseline, launch, window});
  };
  add("four_launch", true, CombineKernel::kTiled, 0, 4, 0);
  if (!sweep) {
    add("lamport", false, CombineKernel::kLamport, 0, 0, 0);
    if (tokens <= 16) {
      add("lamport_no_invitation", false, CombineKernel::kLamport, 0, 0, 0);
      variants.back().launch.invite_next = false;
      add("lamport_no_overlap", false, CombineKernel::kLamport, 0, 0, 0);
      variants.back().launch.overlap_launch = false;
      for (uint32_t step : {1u, 2u}) {
        add("lamport_lengths_" + std::to_string(step), false, CombineKernel::kLamport, 0, 0, 0);
        variants.back().tokens_per_request = step;
      }
    }
    if (tokens >= 8) add("tiled", false, CombineKernel::kTiled, 0, 0, 1);
    return variants;
  }
  if (tokens <= 64) {
    for (uint32_t chunks : {1u, 2u}) {
      for (uint32_t warps : {1u, 2u, 4u, 8u}) {
        add("lamport_c" + std::to_string(chunks) + "_w" + std::to_string(warps), false,
            CombineKernel::kLamport, chunks, warps, 0);
      }
    }
  }
  if (tokens >= 16) {
    for (uint32_t window : {0u, 1u, 2u, 1u << 20}) {
      add("tiled_window" + std::to_string(window), false, CombineKernel::kTiled, 0, 0, window);
    }
  }
  return variants;
}

inline void bench_combine(bool sweep, const std::vector<int>& ranks,
                          const std::vector<int>& tokens) {
  std::printf("\ncombine, bf16, D = 512: us per call (all ranks concurrently)\n");
  for (int heads : {32, 128}) {
    for (int n : ranks) {
      CombineBench bench(n, tokens.back(), heads);
      for (int t : tokens) {
        double base = 0, best_lamport = 1e9, best_tiled = 1e9;
        std::string lamport_name = "-", tiled_name = "-";
        for (const CombineVariant& v : combine_variants(sweep, t)) {
          const double us = bench.time(t, v);
          record("a2a_lse_reduce", v.name.c_str(), n, t, heads, us,
                 CombineBench::bytes_per_rank(n, t, heads));
          if (us < 0) {
            std::printf("  %s N=%d T=%d H=%d: %s\n", v.name.c_str(), n, t, heads,
                        us == -1.0 ? "FAULT" : "WRONG RESULT");
            continue;
          }
          const bool tiled = v.launch.kernel == CombineKernel::kTiled;
          if (v.baseline)
            base = us;
          else if (tiled && us < best_tiled)
            best_tiled = us, tiled_name = v.name;
          else if (!tiled && (v.name == "lamport" || sweep) && us < best_lamport)
            best_lamport = us, lamport_name = v.name;
        }
        const double best = std::min(best_lamport, best_tiled);
        std::printf("N=%d H=%3d T=%3d  four-launch %7.2f", n, heads, t, base);
        for (const auto& [kind, us, name] : {std::tuple{"marked", best_lamport, lamport_name},
                                             std::tuple{"tiled", best_tiled, tiled_name}}) {
          if (us < 1e9) std::printf("  %s %7.2f (%s)", kind, us, name.c_str());
        }
        std::printf("  ratio %.2f  %.2f TB/s\n", base / best,
                    n * CombineBench::bytes_per_rank(n, t, heads) / best * 1e-6);
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace dcp::bench
