// Times of the fused exchanges with N virtual ranks on one GPU: N streams forked and joined in one
// CUDA graph, K calls each; time per call = (t_K - t_1) / (K - 1), medians over replays. All ranks
// share one chip and its memory: this shows launches, instructions and memory traffic, and not the
// latency or bandwidth of a link.
//
//   bench OUT.json [quick|full|sweep] [N]

#include "combine_bench.cuh"
#include "gather_bench.cuh"

using namespace dcp;
using namespace dcp::bench;

namespace {

__global__ void empty_kernel() {}

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
    const double us =
        time_per_call(n, streams, [](int, cudaStream_t s) { empty_kernel<<<1, 32, 0, s>>>(); });
    std::printf("  %d: %.2f", n, us);
    empty_json +=
        (empty_json.empty() ? "" : ", ") + ("\"" + std::to_string(n)) + "\": " + std::to_string(us);
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
