// Gathers, bit for bit: random shapes and bytes (including words of all ones), strided queries,
// padded heads, both kernels, results in fresh memory or in the channel, publish and wait apart.

#include <algorithm>
#include <random>

#include "kv_gather.cuh"
#include "q_gather.cuh"
#include "virtual_ranks.cuh"

using namespace dcp;
using namespace dcp::virtual_ranks;

namespace {

int failures = 0;

struct Case {
  bool query;
  int n, tokens, heads, padded, row_bytes, gap_rows;
  GatherKernel kernel;
  bool in_channel, split;
  uint32_t window, max_blocks, first_epoch;
};

void fail(const Case& c, int call, int rank, const char* what) {
  if (++failures > 20) return;
  std::printf(
      "FAILED %s: call %d rank %d query=%d N=%d T=%d h=%d padded=%d row=%d gap=%d kernel=%d "
      "in_channel=%d split=%d window=%u blocks=%u\n",
      what, call, rank, c.query, c.n, c.tokens, c.heads, c.padded, c.row_bytes, c.gap_rows,
      static_cast<int>(c.kernel), c.in_channel, c.split, c.window, c.max_blocks);
}

void run_case(const Case& c, std::mt19937_64& rng) {
  const uint64_t local = static_cast<uint64_t>(c.tokens) * c.heads * c.row_bytes;
  const uint64_t total =
      c.query ? static_cast<uint64_t>(c.tokens) * c.padded * c.row_bytes : local * c.n;
  Sections sections;
  const uint64_t header = sections.add(sizeof(ChannelHeader), 0);
  const uint64_t regions = static_cast<uint64_t>(kNumSlots) * c.n;
  GatherParams base{};
  base.num_slots = c.in_channel ? 1 : 2;
  base.data_capacity = local;
  if (c.in_channel) base.data_capacity = total;
  if (c.kernel == GatherKernel::kPackets) base.data_capacity = (local + 511) / 512 * 1024;
  base.data_offset = sections.add((c.in_channel ? 1 : regions) * base.data_capacity, 0) - header;
  base.flag_capacity = local / 16 / 32 + 1;
  base.flag_offset = sections.add(regions * base.flag_capacity * 8, 0) - header;
  base.window = c.window;
  World world(c.n, sections);
  world.reset(c.first_epoch);

  std::vector<char*> input(c.n), output(c.n);
  const uint64_t src_rows = static_cast<uint64_t>(c.tokens) * (c.heads + c.gap_rows);
  for (int r = 0; r < c.n; ++r) {
    CUDA_CHECK(cudaMalloc(&input[r], src_rows * c.row_bytes));
    CUDA_CHECK(cudaMalloc(&output[r], total + 16));
  }
  for (int call = 0; call < 3 && failures == 0; ++call) {
    std::vector<unsigned char> want(total, 0);
    for (int r = 0; r < c.n; ++r) {
      std::vector<unsigned char> bytes(src_rows * c.row_bytes);
      for (unsigned char& b : bytes) b = rng() % 4 ? 0xFF : static_cast<unsigned char>(rng());
      CUDA_CHECK(cudaMemcpy(input[r], bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
      CUDA_CHECK(cudaMemset(output[r], 0x5A, total + 16));
      for (int t = 0; t < c.tokens; ++t) {
        for (int j = 0; j < c.heads; ++j) {
          const uint64_t from =
              (static_cast<uint64_t>(t) * (c.heads + c.gap_rows) + j) * c.row_bytes;
          const uint64_t to =
              c.query ? (static_cast<uint64_t>(t) * c.padded + r * c.heads + j) * c.row_bytes
                      : (static_cast<uint64_t>(r) * c.tokens + t) * c.row_bytes;
          std::copy_n(bytes.begin() + from, c.row_bytes, want.begin() + to);
        }
      }
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    GatherLaunch launch;
    launch.kernel = c.kernel;
    launch.share = c.n;
    launch.invite_next = true;
    launch.max_blocks = c.max_blocks;
    for (int phase = 0; phase < (c.split ? 2 : 1); ++phase) {
      for (int r = 0; r < c.n; ++r) {
        GatherParams p = base;
        p.channel = world.channel(r, c.query ? Op::kQGather : Op::kKvGather, 0xABCDu);
        p.input = input[r];
        p.src_outer_stride = static_cast<int64_t>(c.heads + c.gap_rows) * c.row_bytes;
        p.src_inner_stride = c.row_bytes;
        p.output = c.in_channel ? nullptr : output[r];
        if (c.query) {
          plan_q_gather(p, c.tokens, c.heads, c.padded, c.row_bytes);
        } else {
          plan_kv_gather(p, c.tokens, c.row_bytes);
        }
        plan_slices(p);
        p.publish = !c.split || phase == 0;
        p.wait = !c.split || phase == 1;
        CUDA_CHECK(launch_gather(p, launch, world.stream[r]));
      }
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    if (world.any_fault()) fail(c, call, -1, "fault");
    for (int r = 0; r < c.n; ++r) {
      std::vector<unsigned char> got(total);
      const char* at =
          c.in_channel ? world.base[r] + World::kHeaderOffset + base.data_offset : output[r];
      CUDA_CHECK(cudaMemcpy(got.data(), at, total, cudaMemcpyDeviceToHost));
      if (got != want) fail(c, call, r, "bytes differ");
    }
  }
  if (!world.guards_intact()) fail(c, -1, -1, "guards");
  for (int r = 0; r < c.n; ++r) {
    cudaFree(input[r]);
    cudaFree(output[r]);
  }
}

void check_timeout(GatherKernel kernel, bool in_channel) {
  Sections sections;
  const uint64_t header = sections.add(sizeof(ChannelHeader), 0);
  GatherParams p{};
  p.num_slots = in_channel ? 1 : 2;
  p.data_capacity = 65536;
  p.data_offset = sections.add(4 * 65536, 0) - header;
  p.flag_capacity = 64;
  p.flag_offset = sections.add(4 * 64 * 8, 0) - header;
  p.publish = p.wait = 1;
  World world(2, sections);
  char *input = nullptr, *output = nullptr;
  CUDA_CHECK(cudaMalloc(&input, 65536));
  CUDA_CHECK(cudaMemset(input, 0, 65536));
  CUDA_CHECK(cudaMalloc(&output, 65536));
  CUDA_CHECK(cudaMemset(output, 0, 65536));
  p.channel = world.channel(1, Op::kQGather, 5, 0.05);
  p.input = input;
  p.src_outer_stride = 2 * 1152;
  p.src_inner_stride = 1152;
  p.output = in_channel ? nullptr : output;
  plan_q_gather(p, 2, 2, 4, 1152);
  plan_slices(p);
  GatherLaunch launch;
  launch.kernel = kernel;
  launch.share = 2;
  CUDA_CHECK(launch_gather(p, launch, world.stream[1]));
  CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<unsigned char> got(2 * 4 * 1152);
  CUDA_CHECK(cudaMemcpy(got.data(),
                        in_channel ? world.base[1] + World::kHeaderOffset + p.data_offset : output,
                        got.size(), cudaMemcpyDeviceToHost));
  const FaultRecord f = *world.fault[1];
  bool poisoned = true;
  for (int i = 0; i < 2 * 1152; ++i) poisoned = poisoned && got[i] == 0xFF;  // rank 0's heads
  if (f.state != 1 || f.peer != 0 || f.rank != 1 || f.op != 2 || !poisoned) {
    ++failures;
    std::printf("FAILED gather timeout: kernel %d state %u peer %u poisoned %d\n",
                static_cast<int>(kernel), f.state, f.peer, poisoned);
  }
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  const int cases = argc > 1 ? std::atoi(argv[1]) : 150;
  check_timeout(GatherKernel::kPackets, false);
  check_timeout(GatherKernel::kSlices, false);
  check_timeout(GatherKernel::kSlices, true);
  std::mt19937_64 rng(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 977);
  auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + rng() % values.size());
  };
  for (int i = 0; i < cases && failures < 20; ++i) {
    Case c;
    c.query = rng() % 2;
    c.n = pick({2, 3, 4, 5, 6, 7, 8, 11, 16});
    c.heads = c.query ? pick({1, 2, 4, 16}) : 1;
    c.row_bytes = pick({16, 576, 1152, 1152, 2304});
    c.tokens = c.query ? pick({1, 2, 7, 33}) : pick({1, 5, 64, 700});
    c.padded = c.heads * c.n + (rng() % 3 == 0 ? pick({1, 8}) : 0);
    c.gap_rows = rng() % 3 == 0 ? pick({1, 3}) : 0;
    c.kernel = rng() % 2 ? GatherKernel::kPackets : GatherKernel::kSlices;
    c.in_channel = c.kernel == GatherKernel::kSlices && rng() % 2;
    c.split = c.kernel == GatherKernel::kSlices && rng() % 3 == 0;
    c.window = pick({0, 1, 3, 1000});
    c.max_blocks = pick({0, 0, 2, 5});
    c.first_epoch = rng() % 4 == 0 ? 0xFFFFFFFEu : kFirstEpoch;
    run_case(c, rng);
  }
  std::printf("check_gather: %s cases=%d failures=%d\n", failures ? "FAILED" : "ok", cases,
              failures);
  return failures ? 1 : 0;
}
