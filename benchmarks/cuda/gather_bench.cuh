// Times the gathers in every way.
#pragma once

#include "kv_gather.cuh"
#include "q_gather.cuh"
#include "timing.cuh"

namespace dcp::bench {

// Gathers of `rows` 1152-byte rows per rank; `heads` of them a token for the query.
inline void bench_gather(bool query, int n, int tokens, int heads, double copy_tbps) {
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
    base.data_capacity =
        v.in_channel ? total : (v.kernel == GatherKernel::kPackets ? 2 : 1) * local;
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

}  // namespace dcp::bench
