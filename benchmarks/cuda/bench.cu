// Times of the fused exchanges with N virtual ranks on one GPU: N streams forked and joined in one
// CUDA graph, K calls each; time per call = (t_K - t_1) / (K - 1), medians over replays. All ranks
// share one chip and its memory: this shows launches, instructions and memory traffic, and not the
// latency or bandwidth of a link.
//
//   bench OUT.json [quick|full|sweep] [N]

#include <cuda_bf16.h>

#include <algorithm>
#include <functional>

#include "four_launch.cuh"
#include "kv_gather.cuh"
#include "q_gather.cuh"
#include "virtual_ranks.cuh"

using namespace dcp;
using namespace dcp::virtual_ranks;

namespace {

constexpr int kHeadDim = 512;
constexpr int kCalls = 20;
int replays = 60;

using Enqueue = std::function<void(int rank, cudaStream_t stream)>;

cudaGraphExec_t capture(int n, const cudaStream_t* streams, int calls, const Enqueue& enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  std::vector<cudaEvent_t> events(n);
  for (cudaEvent_t& e : events) CUDA_CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  CUDA_CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
  CUDA_CHECK(cudaEventRecord(events[0], streams[0]));
  for (int r = 1; r < n; ++r) CUDA_CHECK(cudaStreamWaitEvent(streams[r], events[0], 0));
  for (int k = 0; k < calls; ++k) {
    for (int r = 0; r < n; ++r) enqueue(r, streams[r]);
  }
  for (int r = 1; r < n; ++r) {
    CUDA_CHECK(cudaEventRecord(events[r], streams[r]));
    CUDA_CHECK(cudaStreamWaitEvent(streams[0], events[r], 0));
  }
  CUDA_CHECK(cudaStreamEndCapture(streams[0], &graph));
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CUDA_CHECK(cudaGraphDestroy(graph));
  for (cudaEvent_t e : events) CUDA_CHECK(cudaEventDestroy(e));
  return exec;
}

double median_us(cudaGraphExec_t graph, cudaStream_t stream) {
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < replays + 5; ++i) {
    CUDA_CHECK(cudaEventRecord(begin, stream));
    CUDA_CHECK(cudaGraphLaunch(graph, stream));
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 5) times.push_back(ms * 1000.0f);
  }
  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

double time_per_call(int n, const cudaStream_t* streams, const Enqueue& enqueue) {
  cudaGraphExec_t one = capture(n, streams, 1, enqueue);
  cudaGraphExec_t many = capture(n, streams, kCalls, enqueue);
  const double t1 = median_us(one, streams[0]), tk = median_us(many, streams[0]);
  CUDA_CHECK(cudaGraphExecDestroy(one));
  CUDA_CHECK(cudaGraphExecDestroy(many));
  return (tk - t1) / (kCalls - 1);
}

__global__ void empty_kernel() {}

__global__ void fill_random(uint32_t* words, size_t count, uint32_t seed, bool lse) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9E3779B9u ^ seed;
    x ^= x >> 16;
    x *= 0x21F0AAADu;
    x ^= x >> 15;
    x *= 0x735A2D97u;
    x ^= x >> 15;
    words[i] = lse ? __float_as_uint((x >> 8) * (8.0f / (1u << 24)) - 4.0f)
                   : ((x & 0x80FF80FFu) | 0x3F003F00u);  // bf16 pairs, magnitude 0.5 to 2
  }
}

// Elements of `a` and `b` that differ by more than rounding.
__global__ void count_differences(const __nv_bfloat16* a, const __nv_bfloat16* b, size_t count,
                                  unsigned long long* differences) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const float x = __bfloat162float(a[i]), y = __bfloat162float(b[i]);
    if (!(fabsf(x - y) <= 0.008f * fabsf(y) + 1e-6f)) atomicAdd(differences, 1ull);
  }
}

std::string json_rows;

void record(const char* op, const char* variant, int n, int tokens, int heads, double us,
            double bytes_per_rank) {
  char row[512];
  std::snprintf(row, sizeof row,
                "%s    {\"op\": \"%s\", \"variant\": \"%s\", \"N\": %d, \"T\": %d, \"H\": %d, "
                "\"us\": %.3f, \"bytes_per_rank\": %.0f, \"aggregate_TBps\": %.3f}",
                json_rows.empty() ? "" : ",\n", op, variant, n, tokens, heads, us, bytes_per_rank,
                n * bytes_per_rank / us * 1e-6);
  json_rows += row;
}

struct CombineVariant {
  std::string name;
  bool baseline;
  CombineLaunch launch;
  uint32_t window;
};

class CombineBench {
 public:
  CombineBench(int n, int max_tokens, int heads)
      : n_(n), heads_(heads),
        layout_(n, static_cast<uint64_t>(max_tokens) * (heads / n), kHeadDim * 2, 0),
        world_(n, layout_.sections) {
    const size_t elements = static_cast<size_t>(max_tokens) * heads * kHeadDim;
    for (int r = 0; r < n; ++r) {
      CUDA_CHECK(cudaMalloc(&partial_[r], elements * 2));
      CUDA_CHECK(cudaMalloc(&lse_[r], elements / kHeadDim * 4));
      CUDA_CHECK(cudaMalloc(&output_[r], elements / n * 2));
      CUDA_CHECK(cudaMalloc(&expected_[r], elements / n * 2));
      fill_random<<<1024, 256>>>(reinterpret_cast<uint32_t*>(partial_[r]), elements / 2, 11 + r, false);
      fill_random<<<64, 256>>>(reinterpret_cast<uint32_t*>(lse_[r]), elements / kHeadDim, 91 + r, true);
    }
    CUDA_CHECK(cudaMalloc(&differences_, 8));
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
  }

  static double bytes_per_rank(int n, int tokens, int heads) {
    // read the input, write and read back what travels, write the result
    const double input = static_cast<double>(tokens) * heads * kHeadDim * 2;
    return input + 2 * input * (n - 1) / n + input / n;
  }

  double time(int tokens, const CombineVariant& v) {
    world_.reset();
    const double us = time_per_call(n_, world_.stream, [&](int r, cudaStream_t s) {
      enqueue(r, s, tokens, v);
    });
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
};

std::vector<CombineVariant> combine_variants(bool sweep, int tokens) {
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

void bench_combine(bool sweep, const std::vector<int>& ranks, const std::vector<int>& tokens) {
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
          if (v.baseline) base = us;
          else if (tiled && us < best_tiled) best_tiled = us, tiled_name = v.name;
          else if (!tiled && v.launch.overlap_launch && v.launch.invite_next && us < best_lamport) best_lamport = us, lamport_name = v.name;
        }
        const double best = std::min(best_lamport, best_tiled);
        std::printf("N=%d H=%3d T=%3d  four-launch %7.2f  marked %7.2f (%s)  tiled %7.2f (%s)  "
                    "ratio %.2f  %.2f TB/s\n",
                    n, heads, t, base, best_lamport, lamport_name.c_str(), best_tiled,
                    tiled_name.c_str(), base / best,
                    n * CombineBench::bytes_per_rank(n, t, heads) / best * 1e-6);
        std::fflush(stdout);
      }
    }
  }
}

// Gathers of `rows` 1152-byte rows per rank; `heads` of them a token for the query.
void bench_gather(bool query, int n, int tokens, int heads, double copy_tbps) {
  const uint32_t row_bytes = 1152;
  const uint64_t local = static_cast<uint64_t>(tokens) * heads * row_bytes, total = local * n;
  struct Variant {
    const char* name;
    GatherKernel kernel;
    bool in_channel;
    uint32_t window;
  };
  std::vector<Variant> variants = {{"slices_in_place", GatherKernel::kSlices, true, 1},
                                   {"slices", GatherKernel::kSlices, false, 1},
                                   {"slices_window4", GatherKernel::kSlices, false, 4}};
  if (local <= 4u << 20) variants.push_back({"packets", GatherKernel::kPackets, false, 1});
  std::printf("%s N=%d rows/rank=%5d:", query ? "q_gather " : "kv_gather", n, tokens * heads);
  for (const Variant& v : variants) {
    Sections sections;
    const uint64_t header = sections.add(sizeof(ChannelHeader), 0);
    const uint64_t regions = static_cast<uint64_t>(kNumSlots) * n;
    GatherParams base{};
    base.num_slots = v.in_channel ? 1 : 2;
    base.data_capacity = v.in_channel ? total : (v.kernel == GatherKernel::kPackets ? 2 : 1) * local;
    base.data_offset = sections.add((v.in_channel ? 1 : regions) * base.data_capacity, 0) - header;
    base.flag_capacity = local / 16 / 32 + 1;
    base.flag_offset = sections.add(regions * base.flag_capacity * 8, 0) - header;
    base.window = v.window;
    base.publish = base.wait = 1;
    World world(n, sections);
    std::vector<char*> input(n), output(n);
    for (int r = 0; r < n; ++r) {
      CUDA_CHECK(cudaMalloc(&input[r], local));
      CUDA_CHECK(cudaMalloc(&output[r], total));
      fill_random<<<256, 256>>>(reinterpret_cast<uint32_t*>(input[r]), local / 4, 5 + r, false);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    // One launch in place needs a rendezvous between calls, which only the combine gives; the
    // timing here ignores the data, so the missing one does not matter.
    const double us = time_per_call(n, world.stream, [&](int r, cudaStream_t s) {
      GatherParams p = base;
      p.channel = world.channel(r, query ? Op::kQGather : Op::kKvGather, 3u);
      p.input = input[r];
      p.src_outer_stride = static_cast<int64_t>(heads) * row_bytes;
      p.src_inner_stride = row_bytes;
      p.output = v.in_channel ? nullptr : output[r];
      if (query) {
        plan_q_gather(p, tokens, heads, heads * n, row_bytes);
      } else {
        plan_kv_gather(p, tokens, row_bytes);
      }
      plan_slices(p);
      GatherLaunch launch;
      launch.kernel = v.kernel;
      launch.share = n;
      launch.invite_next = true;
      CUDA_CHECK(launch_gather(p, launch, s));
    });
    const bool fault = world.any_fault();
    // Read the input, write the result; a copy out of the channel reads and writes once more.
    double bytes = static_cast<double>(local) + total;
    if (!v.in_channel) bytes += 2.0 * (total - local);
    record(query ? "q_gather" : "kv_gather", v.name, n, tokens, heads * n, fault ? -1 : us, bytes);
    std::printf("  %s %.2f us %.0f%%%s", v.name, us, 100.0 * n * bytes / us * 1e-6 / copy_tbps,
                fault ? " FAULT" : "");
    for (int r = 0; r < n; ++r) {
      cudaFree(input[r]);
      cudaFree(output[r]);
    }
  }
  std::printf("\n");
  std::fflush(stdout);
}

double copy_bandwidth_tbps() {
  const size_t bytes = 2ull << 30;
  char *a, *b;
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaMalloc(&a, bytes));
  CUDA_CHECK(cudaMalloc(&b, bytes));
  fill_random<<<1024, 256>>>(reinterpret_cast<uint32_t*>(a), bytes / 4, 1, false);
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    CUDA_CHECK(cudaEventRecord(begin));
    CUDA_CHECK(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice));
    CUDA_CHECK(cudaEventRecord(end));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms);
  }
  CUDA_CHECK(cudaFree(a));
  CUDA_CHECK(cudaFree(b));
  std::sort(times.begin(), times.end());
  return 2.0 * bytes / (times[6] * 1e-3) * 1e-12;
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  const std::string mode = argc > 2 ? argv[2] : "full";
  const bool sweep = mode == "sweep";
  if (mode == "quick") replays = 30;
  cudaDeviceProp device;
  int driver = 0, runtime = 0;
  CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
  CUDA_CHECK(cudaDriverGetVersion(&driver));
  CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  const double copy_tbps = copy_bandwidth_tbps();
  std::printf("%s, %d multiprocessors, driver %d, runtime %d, copy %.2f TB/s\n", device.name,
              device.multiProcessorCount, driver, runtime, copy_tbps);

  std::printf("empty launch, us per node and number of streams:");
  std::string empty_json;
  for (int n : {1, 2, 4, 8}) {
    cudaStream_t streams[8];
    for (int r = 0; r < n; ++r) {
      CUDA_CHECK(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
    }
    const double us = time_per_call(n, streams, [](int, cudaStream_t s) { empty_kernel<<<1, 32, 0, s>>>(); });
    std::printf("  %d: %.2f", n, us);
    empty_json += (empty_json.empty() ? "" : ", ") + ("\"" + std::to_string(n)) + "\": " + std::to_string(us);
    for (int r = 0; r < n; ++r) CUDA_CHECK(cudaStreamDestroy(streams[r]));
  }
  std::printf("\n");

  std::vector<int> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  if (mode == "quick") tokens = {1, 8, 16, 64, 256};
  std::vector<int> ranks = {2, 4, 8};
  if (argc > 3) ranks = {std::atoi(argv[3])};
  bench_combine(sweep, ranks, tokens);
  std::printf("\ngathers of 1152-byte rows: us per call, %% of copy bandwidth\n");
  for (int n : ranks) {
    for (int t : tokens) bench_gather(true, n, t, 128 / n, copy_tbps);
    for (int rows : {4096, 65536}) bench_gather(false, n, rows / n, 1, copy_tbps);
    bench_gather(false, n, 4096, 1, copy_tbps);
  }

  if (argc > 1) {
    std::FILE* file = std::fopen(argv[1], "w");
    if (file == nullptr) {
      std::fprintf(stderr, "cannot write %s\n", argv[1]);
      return 2;
    }
    std::fprintf(file,
                 "{\n  \"gpu\": \"%s\", \"multiprocessors\": %d, \"driver\": %d, \"runtime\": %d,\n"
                 "  \"copy_TBps\": %.3f, \"empty_launch_us\": {%s},\n  \"method\": \"N streams of "
                 "one process in one CUDA graph, (t_%d - t_1) / %d, median of %d replays\",\n"
                 "  \"rows\": [\n%s\n  ]\n}\n",
                 device.name, device.multiProcessorCount, driver, runtime, copy_tbps,
                 empty_json.c_str(), kCalls, kCalls - 1, replays, json_rows.c_str());
    std::fclose(file);
  }
  return 0;
}
