// How the benchmark of virtual ranks measures and keeps what it measured.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <functional>

#include "virtual_ranks.cuh"

namespace dcp::bench {

using namespace dcp::virtual_ranks;

constexpr int kHeadDim = 512;
constexpr int kCalls = 20;
inline int replays = 60;

using Enqueue = std::function<void(int rank, cudaStream_t stream)>;

inline cudaGraphExec_t capture(int n, const cudaStream_t* streams, int calls,
                               const Enqueue& enqueue) {
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

inline double median_us(cudaGraphExec_t graph, cudaStream_t stream) {
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

// Microseconds of one call of all ranks together.
inline double time_per_call(int n, const cudaStream_t* streams, const Enqueue& enqueue) {
  cudaGraphExec_t one = capture(n, streams, 1, enqueue);
  cudaGraphExec_t many = capture(n, streams, kCalls, enqueue);
  const double t1 = median_us(one, streams[0]), tk = median_us(many, streams[0]);
  CUDA_CHECK(cudaGraphExecDestroy(one));
  CUDA_CHECK(cudaGraphExecDestroy(many));
  return (tk - t1) / (kCalls - 1);
}

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
inline std::string json_rows;

inline void record(const char* op, const char* variant, int n, int tokens, int heads, double us,
                   double bytes_per_rank) {
  char row[512];
  std::snprintf(row, sizeof row,
                "%s    {\"op\": \"%s\", \"variant\": \"%s\", \"N\": %d, \"T\": %d, \"H\": %d, "
                "\"us\": %.3f, \"bytes_per_rank\": %.0f, \"aggregate_TBps\": %.3f}",
                json_rows.empty() ? "" : ",\n", op, variant, n, tokens, heads, us, bytes_per_rank,
                n * bytes_per_rank / us * 1e-6);
  json_rows += row;
}

}  // namespace dcp::bench
