// Plain structs shared by host launchers and kernels. No torch, no device code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dcp {

constexpr int kMaxRanks = 16;
constexpr int kNumSlots = 2;
constexpr uint32_t kFirstEpoch = 2;  // 0 and 1 are never used: zero-filled words match no epoch

enum class Op : uint32_t { kA2aLseReduce = 1, kQGather = 2, kKvGather = 3 };
enum class FaultKind : uint32_t { kTimeout = 1, kMismatch = 2 };
enum class Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat64 = 3 };

// First fault of a channel, in host-mapped memory. `state` is written last (0 none, 1 valid).
struct FaultRecord {
  uint32_t state;
  uint32_t kind;
  uint32_t op;
  uint32_t site;
  uint32_t rank;
  uint32_t peer;
  uint32_t epoch_wanted;
  uint32_t epoch_seen;
  uint32_t row;
  uint32_t signature_wanted;
  uint32_t signature_seen;
  uint32_t reserved[5];
};
static_assert(sizeof(FaultRecord) == 64);

// Head of a channel's symmetric buffer.
struct ChannelHeader {
  uint32_t readers;  // of the current call that have read `epoch`; carries into it (sync.cuh)
  uint32_t epoch;    // number of the current call; low bit picks the slot
  uint32_t dead;     // set by the first fault; every later call then ends at once
  uint32_t pad[61];
  uint64_t rendezvous[kNumSlots][kMaxRanks];  // written by peers: epoch << 32 | signature
};
static_assert(sizeof(ChannelHeader) == 512 && offsetof(ChannelHeader, epoch) == 4);

#ifdef DCP_STRESS
// Test build only: delays inside the kernels and protocols that are wrong on purpose.
enum class Variant : uint32_t { kCorrect, kOneSlot, kHostParity, kDeferredClear };
struct Stress {
  Variant variant;
  uint32_t host_slot;
  uint32_t seed;
  uint32_t max_delay_ns;
};
#endif

// One sequence of calls between the ranks, seen from one of them. All buffers that a call may
// touch belong to one channel, so that one epoch orders them. What every warp reads stands first:
// each 64-byte line of parameters costs a miss of the constant cache.
struct Channel {
  ChannelHeader* own;
  uint32_t rank;
  uint32_t world_size;
  uint32_t signature;  // hash of op, shapes, dtypes and options; must agree between ranks
  uint32_t op;
  uint32_t site;
  uint32_t invites_next;  // the launch behind this one may take its place on the chip early
  uint64_t timeout_ns;
  FaultRecord* fault;
#ifdef DCP_STRESS
  Stress stress;
#endif
  char* peer[kMaxRanks];             // base of every rank's payload buffer, own rank included
  ChannelHeader* header[kMaxRanks];  // every rank's header
  char* multicast;  // base of all ranks' payload buffers at once, or null: there is none
};

// x / d for x < 2^31 as one multiplication.
struct FastDiv {
  uint32_t d = 1, multiplier = 1, shift = 0;
  FastDiv() = default;
  explicit FastDiv(uint32_t divisor) : d(divisor) {
    while ((1ull << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>(((1ull << 32) * ((1ull << shift) - d)) / d + 1);
  }
#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t operator()(uint32_t x) const {
    return (__umulhi(x, multiplier) + x) >> shift;
  }
#endif
};

// Which rows of [T, H] each rank ends up with: row i of rank d is token
// first_token[d] + i / heads[d], head first_head[d] + i % heads[d], for i < rows[d]. Where the
// ranks' parts are equal, steps say the same in one line of parameters.
struct ScatterMap {
  uint32_t uniform;  // the ranks' parts are equal; read the steps and not the arrays
  uint32_t uniform_rows, token_step, head_step;
  FastDiv uniform_heads;
  uint32_t same_tokens;  // row i is the same token on every rank
  uint32_t rows[kMaxRanks];
  uint32_t first_token[kMaxRanks];
  uint32_t first_head[kMaxRanks];
  FastDiv heads[kMaxRanks];
};

// Fills the steps and what follows from them from the arrays.
inline void find_steps(ScatterMap& m, uint32_t world_size) {
  m.uniform_rows = m.rows[0];
  m.uniform_heads = m.heads[0];
  m.token_step = world_size > 1 ? m.first_token[1] - m.first_token[0] : 0;
  m.head_step = world_size > 1 ? m.first_head[1] - m.first_head[0] : 0;
  m.uniform = 1;
  for (uint32_t r = 0; r < world_size; ++r) {
    if (m.rows[r] != m.rows[0] || m.heads[r].d != m.heads[0].d ||
        m.first_token[r] != r * m.token_step || m.first_head[r] != r * m.head_step) {
      m.uniform = 0;
    }
  }
}

// A row of D elements is cut into units of at most 32 * kChunks 16-byte chunks; a warp handles
// one unit. Data sits in per-(slot, source) regions of `data_capacity` bytes.
struct CombineParams {
  Channel channel;

  const char* partial;                        // [T, H, D], D contiguous, 16-byte aligned rows
  int64_t stride_token, stride_head;          // bytes
  int64_t stride_rank;                        // from a rank's part to the next one's, if uniform
  const void* lse;                            // [T, H]
  int64_t lse_stride_token, lse_stride_head;  // elements
  int64_t lse_stride_rank;
  Dtype lse_dtype;
  float log2_base;  // log2(e) for base e, 1 for base 2

  const int32_t* seq_lens;         // [B], null: no row mask
  const int32_t* query_start_loc;  // [B + 1]
  uint32_t num_requests;

  char* output;  // [rows[rank], D] contiguous
  Dtype output_dtype;
  float* lse_output;       // [rows[rank]] or null
  float* full_lse_output;  // [T, H] or null

  uint32_t num_tokens, num_heads, head_dim;
  uint32_t row_chunks;   // 16-byte chunks of a row
  uint32_t unit_chunks;  // chunks of a unit
  FastDiv units_per_row;
  uint32_t num_items;  // max over ranks of rows * units_per_row
  uint32_t window;     // tiles that a block pushes ahead of the one it merges

  uint64_t data_offset, data_capacity;          // from the channel base; bytes per (slot, source)
  uint64_t lse_offset, lse_capacity;            // words per (slot, source)
  uint64_t data_slot, lse_slot;                 // bytes from slot 0 to slot 1
  uint64_t flag_offset, flag_capacity;          // words per (slot, source); tiled kernel only
  uint64_t full_lse_offset, full_lse_capacity;  // words per (slot, source)

  ScatterMap scatter;
};

// Units that share one flag in the tiled kernel; equal on all ranks whatever their grids.
constexpr uint32_t kTileUnits = 32;
constexpr uint32_t kTileWarps = 8;

enum class Layout : uint32_t { kPacked = 0, kFinal = 1 };
constexpr uint32_t kGatherThreads = 256;
constexpr int kGatherBatch = 4;  // chunks of a thread in flight

// Gather of `outer * inner` rows of each rank. Chunk g of a rank is chunk c of row (o, j); at
// its destination it lies at o * dst_outer_stride + rank * rank_stride + j * row_bytes + 16 * c.
struct GatherParams {
  Channel channel;

  const char* input;
  int64_t src_outer_stride, src_inner_stride;  // bytes
  FastDiv row_chunks, inner;
  uint32_t num_chunks;                    // of one rank
  int64_t dst_outer_stride, rank_stride;  // bytes
  uint32_t row_bytes;

  char* output;         // null: the result stays in the channel (final layout, `num_slots` 1)
  uint32_t pad_chunks;  // zero chunks behind the ranks' rows of each outer index
  uint32_t num_outer;

  uint32_t slice_chunks;  // chunks that share one flag
  uint32_t num_slots;
  uint32_t window;
  uint32_t publish, wait;  // both in one launch, or one after the other

  uint64_t data_offset, data_capacity;  // bytes per (slot, source), or per slot in final layout
  uint64_t flag_offset, flag_capacity;  // words per (slot, source)
  uint64_t data_slot, flag_slot;        // bytes from slot 0 to slot 1; the launcher's
};

}  // namespace dcp
