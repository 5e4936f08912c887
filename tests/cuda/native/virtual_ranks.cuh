// N virtual ranks on one GPU: each has its own symmetric buffer and stream, all in one process.
// Shared by the checks, the stress test and the benchmark; everything here is host code.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "launchers.h"

#define CUDA_CHECK(call)                                                 \
  do {                                                                   \
    const cudaError_t status_ = (call);                                  \
    if (status_ != cudaSuccess) {                                        \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                   cudaGetErrorString(status_));                         \
      std::exit(2);                                                      \
    }                                                                    \
  } while (0)

namespace dcp::virtual_ranks {

constexpr uint64_t kGuardBytes = 256;
constexpr int kGuardByte = 0xA5;

// Byte layout of one channel: sections in order, each behind a guard that nobody may touch.
class Sections {
 public:
  uint64_t add(uint64_t bytes, int fill) {
    const uint64_t offset = (size_ + kGuardBytes + 255) / 256 * 256;
    guards_.push_back(offset - kGuardBytes);
    sections_.push_back({offset, bytes, fill});
    size_ = offset + bytes;
    return offset;
  }
  uint64_t size() const { return (size_ + kGuardBytes + 255) / 256 * 256; }

  void reset(char* base) const {
    CUDA_CHECK(cudaMemset(base, kGuardByte, size()));
    for (const Section& s : sections_) CUDA_CHECK(cudaMemset(base + s.offset, s.fill, s.bytes));
  }

  // Whether every byte outside the sections still has the guard's value.
  bool guards_intact(const char* base) const {
    uint64_t at = 0;
    for (size_t i = 0; i <= sections_.size(); ++i) {
      const uint64_t end = i < sections_.size() ? sections_[i].offset : size();
      std::vector<unsigned char> bytes(end - at);
      CUDA_CHECK(cudaMemcpy(bytes.data(), base + at, bytes.size(), cudaMemcpyDeviceToHost));
      for (unsigned char b : bytes) {
        if (b != kGuardByte) return false;
      }
      if (i < sections_.size()) at = sections_[i].offset + sections_[i].bytes;
    }
    return true;
  }

 private:
  struct Section {
    uint64_t offset, bytes;
    int fill;
  };
  std::vector<Section> sections_;
  std::vector<uint64_t> guards_;
  uint64_t size_ = 0;
};

// One channel on all ranks, with streams and fault records.
class World {
 public:
  World(int world_size, const Sections& sections) : size(world_size), sections_(sections) {
    for (int r = 0; r < size; ++r) {
      CUDA_CHECK(cudaMalloc(&base[r], sections_.size()));
      CUDA_CHECK(cudaStreamCreateWithFlags(&stream[r], cudaStreamNonBlocking));
      CUDA_CHECK(cudaHostAlloc(&fault[r], sizeof(FaultRecord), cudaHostAllocMapped));
    }
    reset();
  }
  ~World() {
    for (int r = 0; r < size; ++r) {
      cudaFree(base[r]);
      cudaStreamDestroy(stream[r]);
      cudaFreeHost(fault[r]);
    }
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // What recover() does on all ranks together.
  void reset(uint32_t epoch = kFirstEpoch) {
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int r = 0; r < size; ++r) {
      sections_.reset(base[r]);
      CUDA_CHECK(cudaMemset(header(r), 0, sizeof(ChannelHeader)));
      CUDA_CHECK(cudaMemcpy(&header(r)->epoch, &epoch, 4, cudaMemcpyHostToDevice));
      std::memset(fault[r], 0, sizeof(FaultRecord));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
  }

  ChannelHeader* header(int r) const {
    return reinterpret_cast<ChannelHeader*>(base[r] + kHeaderOffset);
  }

  Channel channel(int rank, Op op, uint32_t signature, double timeout_s = 2.0) const {
    Channel c{};
    for (int r = 0; r < size; ++r) {
      c.peer[r] = base[r] + kHeaderOffset;
      c.header[r] = header(r);
    }
    c.own = header(rank);
    c.fault = fault[rank];
    c.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
    c.rank = rank;
    c.world_size = size;
    c.signature = signature;
    c.op = static_cast<uint32_t>(op);
    c.site = 7;
    return c;
  }

  bool guards_intact() const {
    for (int r = 0; r < size; ++r) {
      if (!sections_.guards_intact(base[r])) return false;
    }
    return true;
  }

  // Whether on all ranks these bytes, `offset` counted from the header, have this value.
  bool all_bytes(uint64_t offset, uint64_t bytes, unsigned char value) const {
    std::vector<unsigned char> host(bytes);
    for (int r = 0; r < size; ++r) {
      CUDA_CHECK(
          cudaMemcpy(host.data(), base[r] + kHeaderOffset + offset, bytes, cudaMemcpyDeviceToHost));
      for (unsigned char b : host) {
        if (b != value) return false;
      }
    }
    return true;
  }

  bool any_fault(bool print = true) const {
    bool any = false;
    for (int r = 0; r < size; ++r) {
      const volatile FaultRecord* f = fault[r];
      if (f->state == 0) continue;
      any = true;
      if (print) {
        std::printf("  fault: kind %u op %u rank %u peer %u epoch wanted %u seen %u row %d\n",
                    f->kind, f->op, f->rank, f->peer, f->epoch_wanted, f->epoch_seen,
                    static_cast<int>(f->row));
      }
    }
    return any;
  }

  // The header is the first section of every layout.
  static constexpr uint64_t kHeaderOffset = 256;

  const int size;
  char* base[kMaxRanks];
  cudaStream_t stream[kMaxRanks];
  FaultRecord* fault[kMaxRanks];

 private:
  Sections sections_;
};

// Section offsets of a combine channel, relative to the header.
struct CombineLayout {
  Sections sections;
  CombineParams lamport{}, tiled{};

  CombineLayout(int n, uint64_t max_rows, uint64_t row_bytes, uint64_t max_full_rows,
                bool with_tiled = true) {
    const uint64_t header = sections.add(sizeof(ChannelHeader), 0);
    const uint64_t regions = static_cast<uint64_t>(kNumSlots) * n;
    const uint64_t units = max_rows * ((row_bytes + 511) / 512);
    lamport.data_capacity = max_rows * row_bytes;
    lamport.lse_capacity = units;
    lamport.full_lse_capacity = max_full_rows;
    lamport.data_offset = sections.add(regions * lamport.data_capacity, 0xFF) - header;
    lamport.lse_offset = sections.add(regions * units * 8, 0xFF) - header;
    lamport.full_lse_offset = sections.add(regions * max_full_rows * 8, 0xFF) - header;
    tiled = lamport;
    if (!with_tiled) return;
    tiled.flag_capacity = units / 32 + 1;
    tiled.data_offset = sections.add(regions * tiled.data_capacity, 0) - header;
    tiled.lse_offset = sections.add(regions * units * 8, 0) - header;
    tiled.flag_offset = sections.add(regions * tiled.flag_capacity * 8, 0) - header;
  }
};

// Scatter maps as ops.py declares them. `splits` may be uneven; ignored for "none".
inline ScatterMap scatter_map(const std::string& mode, const std::vector<uint32_t>& splits,
                              uint32_t num_tokens, uint32_t num_heads) {
  ScatterMap m{};
  uint32_t first = 0;
  m.same_tokens = 1;
  for (size_t r = 0; r < splits.size(); ++r) {
    if (mode == "heads") {
      m.rows[r] = num_tokens * splits[r];
      m.first_head[r] = first;
      m.heads[r] = FastDiv(splits[r] == 0 ? 1 : splits[r]);
      if (splits[r] != splits[0]) m.same_tokens = 0;
    } else if (mode == "tokens") {
      m.rows[r] = splits[r] * num_heads;
      m.first_token[r] = first;
      m.heads[r] = FastDiv(num_heads);
      m.same_tokens = 0;
    } else {
      m.rows[r] = num_tokens * num_heads;
      m.heads[r] = FastDiv(num_heads);
    }
    first += splits[r];
  }
  find_steps(m, static_cast<uint32_t>(splits.size()));
  return m;
}

inline std::vector<uint32_t> even_splits(uint32_t total, int n) {
  return std::vector<uint32_t>(n, total / n);
}

}  // namespace dcp::virtual_ranks
