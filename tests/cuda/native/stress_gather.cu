// Protocol stress of the gathers, by the method of stress.cu: every rank replays graphs of its own,
// with delays inside the kernels; bytes change with every call (a hash of call, source and chunk);
// row counts alternate, and with them both kernels over one channel; launches in a row overlap;
// every chunk of every result is checked on the device. Built with DCP_STRESS.
//
// Controls. A gather with one slot, or with slots that follow the host, must fail: a peer that has
// all it needs for a call goes on to the next one, and stores over tags and flags that this rank
// has not seen yet. It then waits for an epoch that is gone, or copies the wrong bytes. The same
// for a result that stays in the channel with one slot for the data, as there is no merge between
// two gathers here; its flags have two slots, so only the check of the data can tell. Left out is
// Variant::kDeferredClear: gathers arm nothing again, so to them it is the correct protocol.

#include "kv_gather.cuh"
#include "q_gather.cuh"
#include "stress_run.cuh"

using namespace dcp;
using namespace dcp::virtual_ranks;

namespace {

constexpr uint32_t kRowBytes = 1152, kRowChunks = kRowBytes / 16;
constexpr uint32_t kQueryHeads = 2;  // of a rank; one head of padding behind those of all
constexpr int kStepsPerGraph = 3;    // odd: slots must not follow the host

// Chunk g of a source: any bytes, words of all ones and of zeros among them.
__device__ uint4 chunk_value(uint32_t call, uint32_t source, uint32_t g) {
  const uint32_t h = mix(mix(call, source + 1), g);
  uint32_t words[4];
  for (uint32_t w = 0; w < 4; ++w) {
    const uint32_t kind = h >> 4 * w & 15u;
    words[w] = kind == 0 ? 0xFFFFFFFFu : kind == 1 ? 0u : mix(h, w);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ bool differ(const uint4& a, const uint4& b) {
  return a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
}

__global__ void generate(const RankState* state, uint32_t ahead, uint32_t rank, uint32_t chunks,
                         uint4* input) {
  const uint32_t call = state->call + ahead;
  for (uint32_t g = blockIdx.x * blockDim.x + threadIdx.x; g < chunks;
       g += gridDim.x * blockDim.x) {
    input[g] = chunk_value(call, rank, g);
  }
}

// A result [tokens, padded heads, row]; KV rows of a rank are heads of one token.
struct Shape {
  uint32_t tokens, heads, padded;
};

// Recomputes what every source sent. Results of odd calls lie `odd_offset` bytes further on.
__global__ void verify(RankState* state, uint32_t ahead, uint32_t n, Shape shape,
                       const char* result, uint64_t odd_offset) {
  const uint32_t call = state->call + ahead;
  const uint4* got = reinterpret_cast<const uint4*>(result + (call & 1u ? odd_offset : 0));
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
       i < shape.tokens * shape.padded * kRowChunks; i += gridDim.x * blockDim.x) {
    const uint32_t row = i / kRowChunks, token = row / shape.padded, head = row % shape.padded;
    const uint32_t source = head / shape.heads;
    const uint32_t g = (token * shape.heads + head % shape.heads) * kRowChunks + i % kRowChunks;
    const uint4 want = source < n ? chunk_value(call, source, g) : make_uint4(0, 0, 0, 0);
    const uint4 chunk = got[i];
    if (differ(chunk, want) && atomicAdd(&state->errors, 1ull) == 0) {
      state->first_error[0] = call;
      state->first_error[1] = source;
      state->first_error[2] = g;
      state->first_error[3] = chunk.x;
      state->first_error[4] = want.x;
    }
  }
}

// To fresh memory; staying in the channel, in two slots or in one; to fresh memory, with a launch
// that publishes ahead of the one that waits.
enum class Way { kFresh, kInPlace, kOnePlace, kSentAhead };

struct Config {
  const char* name;
  bool query;  // heads of all ranks side by side; otherwise KV rows, one rank's behind another's
  int n;
  std::vector<int> rows;  // in turn: tokens of the query, or KV rows of a rank
  int slices_from;        // fewer rows go by packets
  int calls;
  uint32_t max_delay_ns;
  Variant variant = Variant::kCorrect;
  int chain = 1;  // launches in a row, which then overlap
  Way way = Way::kFresh;

  bool in_place() const { return way == Way::kInPlace || way == Way::kOnePlace; }
  bool correct() const { return variant == Variant::kCorrect && way != Way::kOnePlace; }
};

class Run {
 public:
  explicit Run(const Config& config) : c_(config), sections_(lay_out()), world_(c_.n, sections_) {
    for (int r = 0; r < c_.n; ++r) {
      state_[r] = new_state();
      CUDA_CHECK(cudaMalloc(&input_[r], c_.chain * local_bytes()));
      CUDA_CHECK(cudaMalloc(&output_[r], c_.chain * result_bytes()));
    }
  }
  ~Run() {
    for (int r = 0; r < c_.n; ++r) {
      cudaFree(state_[r]);
      cudaFree(input_[r]);
      cudaFree(output_[r]);
    }
  }

  Outcome go() {
    const int count = c_.calls / (kStepsPerGraph * c_.chain);
    Outcome outcome =
        replay(world_, state_, {c_.rows.size(), kStepsPerGraph, c_.chain, count, c_.correct()},
               [this](int r, size_t kind, int step) { enqueue(r, kind, step); });
    for (int r = 0; r < c_.n && c_.correct(); ++r) {
      const RankState& s = outcome.states[r];
      if (s.errors == 0) continue;
      std::printf("  rank %d: %llu errors, first: call %u source %u chunk %u got %08x want %08x\n",
                  r, s.errors, s.first_error[0], s.first_error[1], s.first_error[2],
                  s.first_error[3], s.first_error[4]);
    }
    if (!outcome.faulted && outcome.errors == 0 && !world_.guards_intact()) {
      std::printf("  bytes beside the sections have changed\n");
      outcome.errors = 1;
    }
    return outcome;
  }

 private:
  Shape shape(int rows) const {
    if (!c_.query) return {1, static_cast<uint32_t>(rows), static_cast<uint32_t>(rows * c_.n)};
    return {static_cast<uint32_t>(rows), kQueryHeads, kQueryHeads * c_.n + 1};
  }
  uint32_t local_chunks(int rows) const {
    const Shape s = shape(rows);
    return s.tokens * s.heads * kRowChunks;
  }
  int most_rows() const {
    int most = 0;
    for (int rows : c_.rows) most = rows > most ? rows : most;
    return most;
  }
  uint64_t local_bytes() const { return local_chunks(most_rows()) * 16ull; }
  uint64_t result_bytes() const {
    const Shape s = shape(most_rows());
    return static_cast<uint64_t>(s.tokens) * s.padded * kRowBytes;
  }

  // Sections of both kernels behind one header.
  Sections lay_out() {
    Sections sections;
    const uint64_t header = sections.add(sizeof(ChannelHeader), 0);
    const uint64_t regions = static_cast<uint64_t>(kNumSlots) * c_.n;
    packets_.num_slots = kNumSlots;
    packets_.data_capacity = (local_bytes() + 511) / 512 * 1024;
    packets_.data_offset = sections.add(regions * packets_.data_capacity, 0) - header;
    packets_.flag_capacity = local_bytes() / 512 + 1;
    packets_.flag_offset = sections.add(regions * packets_.flag_capacity * 8, 0) - header;
    slices_.num_slots = c_.way == Way::kOnePlace ? 1 : kNumSlots;
    slices_.data_capacity = c_.in_place() ? result_bytes() : local_bytes();
    const uint64_t places = c_.in_place() ? slices_.num_slots : regions;
    slices_.data_offset = sections.add(places * slices_.data_capacity, 0) - header;
    slices_.flag_capacity = local_bytes() / (16 * kGatherThreads) + 1;
    slices_.flag_offset = sections.add(regions * slices_.flag_capacity * 8, 0) - header;
    return sections;
  }

  // Calls of a step differ in their rows, so that each kernel follows the other.
  void enqueue(int r, size_t kind, int step) {
    const cudaStream_t stream = world_.stream[r];
    const auto rows = [&](int k) { return c_.rows[(kind + step * c_.chain + k) % c_.rows.size()]; };
    for (int k = 0; k < c_.chain; ++k) {
      generate<<<8, 128, 0, stream>>>(state_[r], k, r, local_chunks(rows(k)),
                                      reinterpret_cast<uint4*>(input(r, k)));
    }
    for (int k = 0; k < c_.chain; ++k) gather(r, rows(k), step & 1, k);
    for (int k = 0; k < c_.chain; ++k) {
      const char* result = output_[r] + k * result_bytes();
      uint64_t odd_offset = 0;
      if (c_.in_place()) {
        result = world_.base[r] + World::kHeaderOffset + slices_.data_offset;
        // The first call has an even epoch. A wrong protocol uses one slot for all calls.
        if (c_.correct()) odd_offset = slices_.data_capacity;
      }
      verify<<<16, 128, 0, stream>>>(state_[r], k, c_.n, shape(rows(k)), result, odd_offset);
    }
    next_calls<<<1, 1, 0, stream>>>(state_[r], c_.chain);
    CUDA_CHECK(cudaGetLastError());
  }

  char* input(int r, int k) const { return input_[r] + k * local_bytes(); }

  void gather(int r, int rows, uint32_t host_slot, int k) {
    GatherLaunch launch;
    launch.kernel = rows < c_.slices_from ? GatherKernel::kPackets : GatherKernel::kSlices;
    launch.share = 2 * c_.n;  // room for the other kernels of the test
    launch.invite_next = true;
    if (r % 2 == 1) launch.max_blocks = 5;  // ranks need not have equal grids
    GatherParams p = launch.kernel == GatherKernel::kPackets ? packets_ : slices_;
    p.channel = world_.channel(r, c_.query ? Op::kQGather : Op::kKvGather, 0x2000u + rows,
                               c_.correct() ? 20.0 : 0.2);
    p.channel.stress = {c_.variant, host_slot, 77u, c_.max_delay_ns};
    p.input = input(r, k);
    p.src_outer_stride = (c_.query ? kQueryHeads : 1) * static_cast<int64_t>(kRowBytes);
    p.src_inner_stride = kRowBytes;
    if (!c_.in_place()) p.output = output_[r] + k * result_bytes();
    if (c_.query) {
      plan_q_gather(p, rows, kQueryHeads, shape(rows).padded, kRowBytes);
    } else {
      plan_kv_gather(p, rows, kRowBytes);
    }
    plan_slices(p);
    p.window = 1;
    p.publish = 1;
    p.wait = c_.way != Way::kSentAhead;
    CUDA_CHECK(launch_gather(p, launch, world_.stream[r]));
    if (p.wait) return;
    p.publish = 0;
    p.wait = 1;
    CUDA_CHECK(launch_gather(p, launch, world_.stream[r]));
  }

  Config c_;
  GatherParams packets_{}, slices_{};  // set by lay_out(), so they stand ahead of what it makes
  Sections sections_;
  World world_;
  RankState* state_[kMaxRanks];
  char *input_[kMaxRanks], *output_[kMaxRanks];
};

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  const int calls = argc > 1 ? std::atoi(argv[1]) : 10000;  // of the long runs
  const Variant kCorrect = Variant::kCorrect, kOneSlot = Variant::kOneSlot;
  const Variant kHostParity = Variant::kHostParity;
  const Way kInPlace = Way::kInPlace, kOnePlace = Way::kOnePlace, kSentAhead = Way::kSentAhead;
  const std::vector<Config> configs = {
      {"query N=2 T=1 packets undelayed", true, 2, {1}, 99, calls, 0},
      {"query N=2 T=1,3 packets", true, 2, {1, 3}, 99, calls, 3000},
      {"KV N=4 t=1,5,24 packets", false, 4, {1, 5, 24}, 99, calls, 3000},
      {"query N=8 T=1,4 packets", true, 8, {1, 4}, 99, calls / 2, 3000},
      {"query N=2 T=5,16 slices", true, 2, {5, 16}, 1, calls, 3000},
      {"KV N=4 t=9,64 slices", false, 4, {9, 64}, 1, calls / 2, 3000},
      {"query N=8 T=3,8 slices", true, 8, {3, 8}, 1, calls / 2, 3000},
      {"query N=3 T=2,5,16 in place", true, 3, {2, 5, 16}, 1, calls, 3000, kCorrect, 1, kInPlace},
      {"KV N=4 t=5,64 in place", false, 4, {5, 64}, 1, calls / 2, 3000, kCorrect, 1, kInPlace},
      {"query N=2 T=1,3,16 both in a row", true, 2, {1, 3, 16}, 4, calls, 3000, kCorrect, 3},
      {"KV N=4 t=1,24,64 both in a row", false, 4, {1, 24, 64}, 25, calls, 3000, kCorrect, 3},
      {"query N=8 T=1,8 both in a row", true, 8, {1, 8}, 4, calls / 4, 3000, kCorrect, 3},
      {"KV N=4 t=5,64 sent ahead", false, 4, {5, 64}, 1, calls / 2, 3000, kCorrect, 3, kSentAhead},
      {"control: one slot, packets", true, 4, {1, 3}, 99, calls, 40000, kOneSlot},
      {"control: one slot, slices", false, 4, {9, 64}, 1, calls, 40000, kOneSlot},
      {"control: one slot, in place", true, 4, {9}, 1, calls, 40000, kOneSlot, 1, kInPlace},
      {"control: one slot, in a row", true, 4, {1, 3, 16}, 4, calls, 40000, kOneSlot, 3},
      {"control: host parity, packets", true, 4, {1, 3}, 99, calls, 40000, kHostParity},
      {"control: host parity, slices", false, 4, {9, 64}, 1, calls, 40000, kHostParity},
      {"control: one place, no merge", true, 4, {9}, 1, calls, 40000, kCorrect, 1, kOnePlace},
  };
  int failures = 0;
  for (const Config& config : configs) {
    if (!report(config.name, Run(config).go(), config.correct())) ++failures;
  }
  std::printf("stress_gather: %s\n", failures ? "FAILED" : "ok");
  return failures ? 1 : 0;
}
