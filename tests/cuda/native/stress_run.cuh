// What the stress programs share: numbers from a hash, what a rank counts on the device, and the
// loop in which every rank replays graphs of its own on a stream of its own, so that ranks drift
// against each other.
#pragma once

#include <chrono>
#include <random>

#include "virtual_ranks.cuh"

namespace dcp::virtual_ranks {

__host__ __device__ inline uint32_t mix(uint32_t a, uint32_t b) {
  uint32_t x = a * 0x9E3779B9u ^ (b + 0x7F4A7C15u);
  x ^= x >> 16;
  x *= 0x21F0AAADu;
  x ^= x >> 15;
  x *= 0x735A2D97u;
  return x ^ x >> 15;
}

struct RankState {
  uint32_t call;  // number of the next call, advanced on the device
  uint32_t pad;
  unsigned long long errors;
  uint32_t first_error[6];
};

static __global__ void next_calls(RankState* state, uint32_t count) { state->call += count; }

inline RankState* new_state() {
  RankState* state = nullptr;
  CUDA_CHECK(cudaMalloc(&state, sizeof(RankState)));
  CUDA_CHECK(cudaMemset(state, 0, sizeof(RankState)));
  return state;
}

inline RankState read_state(const RankState* state) {
  RankState s;
  CUDA_CHECK(cudaMemcpy(&s, state, sizeof s, cudaMemcpyDeviceToHost));
  return s;
}

struct Outcome {
  bool faulted;
  unsigned long long errors;
  long long calls;
  double seconds;
  std::vector<RankState> states;  // by rank
};

// A step is all inputs, launches and checks of `chain` calls in a row.
struct Replays {
  size_t kinds;  // of graphs; each replay draws one
  int steps_per_graph;
  int chain;
  int count;
  bool correct;  // the protocol; a wrong one is done once it is caught
};

// `enqueue(rank, kind, step)` puts one step on the rank's stream, captured as step `step` of a
// graph or, now and then, eagerly as step 0.
template <typename Enqueue>
Outcome replay(const World& world, RankState* const* state, const Replays& replays,
               Enqueue enqueue) {
  std::vector<std::vector<cudaGraphExec_t>> graphs(replays.kinds);
  for (size_t kind = 0; kind < replays.kinds; ++kind) {
    for (int r = 0; r < world.size; ++r) {
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      CUDA_CHECK(cudaStreamBeginCapture(world.stream[r], cudaStreamCaptureModeThreadLocal));
      for (int step = 0; step < replays.steps_per_graph; ++step) enqueue(r, kind, step);
      CUDA_CHECK(cudaStreamEndCapture(world.stream[r], &graph));
      CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
      CUDA_CHECK(cudaGraphDestroy(graph));
      graphs[kind].push_back(exec);
    }
  }
  const auto start = std::chrono::steady_clock::now();
  std::mt19937_64 rng(5);
  Outcome outcome{};
  for (int i = 0; i < replays.count; ++i) {
    const size_t kind = rng() % replays.kinds;
    const bool eager = rng() % 16 == 0;
    for (int r = 0; r < world.size; ++r) {
      if (eager) {
        enqueue(r, kind, 0);
      } else {
        CUDA_CHECK(cudaGraphLaunch(graphs[kind][r], world.stream[r]));
      }
    }
    outcome.calls += (eager ? 1 : replays.steps_per_graph) * replays.chain;
    if (i % 256 == 255) {  // bounds the queue, keeps the drift
      const int r = rng() % world.size;
      CUDA_CHECK(cudaStreamSynchronize(world.stream[r]));
      if (world.any_fault(false)) break;
      if (!replays.correct && read_state(state[r]).errors > 0) break;
    }
  }
  CUDA_CHECK(cudaDeviceSynchronize());
  outcome.faulted = world.any_fault(replays.correct);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  outcome.seconds = took.count();
  for (int r = 0; r < world.size; ++r) {
    outcome.states.push_back(read_state(state[r]));
    outcome.errors += outcome.states[r].errors;
  }
  for (auto& of_kind : graphs) {
    for (cudaGraphExec_t graph : of_kind) cudaGraphExecDestroy(graph);
  }
  return outcome;
}

// A line of the table. Whether the outcome is as it has to be: a wrong protocol must be caught.
inline bool report(const char* name, const Outcome& o, bool correct) {
  const bool bad = o.faulted || o.errors > 0;
  const bool expected = bad != correct;
  std::printf("%-32s calls=%lld %.1fs %s%s\n", name, o.calls, o.seconds,
              bad ? (o.faulted ? "fault" : "wrong data") : "clean",
              expected ? "" : "   <-- FAILED");
  std::fflush(stdout);
  return expected;
}

}  // namespace dcp::virtual_ranks
