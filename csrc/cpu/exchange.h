// The three exchanges over shared memory. Each writes this rank's part into its own arena,
// publishes, waits for all peers, and reads what it needs straight from theirs.
//
// A call that returns kPending has published and is repeated with `resume`. The arena is read and
// written through 64-bit offsets only. No torch headers here.
#pragma once

#include <algorithm>
#include <cstring>

#include "merge.h"
#include "sync.h"

namespace dcp {

// Signatures only: ranks learn that they agree, or (with compare off) what their peers say.
inline Status agree(const Table& table, const unsigned char* signature, bool compare, bool resume) {
  const uint32_t epoch = resume ? current(table) : begin(table);
  if (!resume) publish(table, epoch, signature);
  return wait(table, epoch, compare ? signature : nullptr);
}

struct Gather {
  const unsigned char* input;  // [tokens, heads, row_bytes]
  int64_t tokens, heads, row_bytes;
  int64_t input_token_stride, input_head_stride;  // bytes
  unsigned char* output;
  int64_t output_rank_stride, output_token_stride;  // bytes; a token's heads lie together
};

inline void copy_rows(const Gather& g, unsigned char* to, int64_t to_token_stride) {
  const int64_t token_bytes = g.heads * g.row_bytes;
  const bool dense = g.input_head_stride == g.row_bytes || g.heads == 1;
  for (int64_t t = 0; t < g.tokens; ++t) {
    const unsigned char* from = g.input + t * g.input_token_stride;
    unsigned char* row = to + t * to_token_stride;
    if (dense) {
      std::memcpy(row, from, token_bytes);
      continue;
    }
    for (int64_t h = 0; h < g.heads; ++h)
      std::memcpy(row + h * g.row_bytes, from + h * g.input_head_stride, g.row_bytes);
  }
}

inline Status gather(const Table& table, const unsigned char* signature, const Gather& g,
                     bool resume) {
  const int64_t token_bytes = g.heads * g.row_bytes;
  const uint32_t epoch = resume ? current(table) : begin(table);
  if (!resume) {
    copy_rows(g, table.payload(table.rank, epoch), token_bytes);
    publish(table, epoch, signature);
    copy_rows(g, g.output + table.rank * g.output_rank_stride, g.output_token_stride);
  }
  const Status status = wait(table, epoch, signature);
  if (status != kDone) return status;
  for (int64_t peer = 0; peer < table.world_size; ++peer) {
    if (peer == table.rank) continue;
    const unsigned char* from = table.payload(peer, epoch);
    unsigned char* to = g.output + peer * g.output_rank_stride;
    if (g.output_token_stride == token_bytes) {
      std::memcpy(to, from, g.tokens * token_bytes);
      continue;
    }
    for (int64_t t = 0; t < g.tokens; ++t)
      std::memcpy(to + t * g.output_token_stride, from + t * token_bytes, token_bytes);
  }
  return kDone;
}

// Integers of 4 or 8 bytes, as lengths arrive in practice.
struct Ints {
  const void* data;
  bool wide;
  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct Combine {
  const unsigned char* partial_output;  // [tokens, heads, head_dim]
  Dtype dtype;
  int64_t tokens, heads, head_dim;
  int64_t token_stride, head_stride;  // bytes
  const unsigned char* partial_lse;   // [tokens, heads]
  Dtype lse_dtype;
  int64_t lse_token_stride, lse_head_stride;  // bytes
  // This rank's part of the result.
  int64_t first_token, last_token, first_head, last_head;
  bool every_rank_takes_all;
  bool is_lse_base_on_e;
  // Rows to treat as empty; sequences < 0: none.
  int64_t sequences;
  Ints seq_lens, query_start_loc;
  unsigned char* output;  // [last_token - first_token, last_head - first_head, head_dim]
  Dtype output_dtype;
  float* lse;  // null, or like output without head_dim, or [tokens, heads] with full_lse
  bool full_lse;

  int64_t element() const { return dtype == kFloat32 ? 4 : 2; }
  int64_t row_bytes() const { return head_dim * element(); }
  // Where the LSEs [tokens, heads] stand in an arena, behind the payload [tokens, heads, head_dim].
  int64_t lse_offset() const { return (tokens * heads * row_bytes() + 63) / 64 * 64; }
  bool is_mine(int64_t token, int64_t head) const {
    return token >= first_token && token < last_token && head >= first_head && head < last_head;
  }
};

inline float read_lse(const unsigned char* at, Dtype dtype) {
  float value;
  if (dtype == kFloat32) {
    std::memcpy(&value, at, sizeof value);
  } else if (dtype == kFloat64) {
    double wide;
    std::memcpy(&wide, at, sizeof wide);
    value = widen(wide);
  } else {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    value = dtype == kBFloat16 ? widen(bf16{bits}) : widen(fp16{bits});
  }
  // The negated comparison holds for NaN too.
  return !(value < std::numeric_limits<float>::infinity()) ? kEmpty : value;
}

inline void send(const Combine& c, unsigned char* arena) {
  float* lses = reinterpret_cast<float*>(arena + c.lse_offset());
  const int64_t row_bytes = c.row_bytes();
  int64_t sequence = 0;
  for (int64_t t = 0; t < c.tokens; ++t) {
    bool empty = false;
    if (c.sequences >= 0) {
      while (sequence < c.sequences && c.query_start_loc[sequence + 1] <= t) ++sequence;
      empty = sequence >= c.sequences || c.seq_lens[sequence] <= 0 || c.query_start_loc[0] > t;
    }
    for (int64_t h = 0; h < c.heads; ++h) {
      const float lse =
          empty ? kEmpty
                : read_lse(c.partial_lse + t * c.lse_token_stride + h * c.lse_head_stride,
                           c.lse_dtype);
      lses[t * c.heads + h] = lse;
      // Peers never read the payload of an empty row, nor this rank's own part of the result.
      if (lse == kEmpty || (!c.every_rank_takes_all && c.is_mine(t, h))) continue;
      std::memcpy(arena + (t * c.heads + h) * row_bytes,
                  c.partial_output + t * c.token_stride + h * c.head_stride, row_bytes);
    }
  }
}

inline void receive(const Table& table, const Combine& c, uint32_t epoch) {
  const unsigned char* arenas[kMaxRanks];
  for (int64_t s = 0; s < table.world_size; ++s) arenas[s] = table.payload(s, epoch);
  const MergeRow merge = merge_row_for(c.dtype, c.output_dtype);
  const int64_t row_bytes = c.row_bytes();
  const int64_t out_row_bytes = c.head_dim * (c.output_dtype == kFloat32 ? 4 : 2);
  const int64_t my_heads = c.last_head - c.first_head;
  const bool all_rows = c.lse && c.full_lse;
  float lse[kMaxRanks];
  Shards shards;
  for (int64_t t = all_rows ? 0 : c.first_token; t < (all_rows ? c.tokens : c.last_token); ++t) {
    for (int64_t h = all_rows ? 0 : c.first_head; h < (all_rows ? c.heads : c.last_head); ++h) {
      const int64_t row = t * c.heads + h;
      for (int64_t s = 0; s < table.world_size; ++s)
        lse[s] = reinterpret_cast<const float*>(arenas[s] + c.lse_offset())[row];
      const float merged = shares_of(lse, table.world_size, c.is_lse_base_on_e);
      if (all_rows) c.lse[row] = merged;
      if (!c.is_mine(t, h)) continue;
      const int64_t my_row = (t - c.first_token) * my_heads + h - c.first_head;
      if (c.lse && !c.full_lse) c.lse[my_row] = merged;
      shards.count = 0;
      for (int64_t s = 0; s < table.world_size; ++s) {
        if (lse[s] == 0.0f) continue;
        shards.share[shards.count] = lse[s];
        shards.payload[shards.count++] =
            s == table.rank ? c.partial_output + t * c.token_stride + h * c.head_stride
                            : arenas[s] + row * row_bytes;
      }
      merge(shards, c.output + my_row * out_row_bytes, c.head_dim);
    }
  }
}

inline Status combine(const Table& table, const unsigned char* signature, const Combine& c,
                      bool resume) {
  const uint32_t epoch = resume ? current(table) : begin(table);
  if (!resume) {
    send(c, table.payload(table.rank, epoch));
    publish(table, epoch, signature);
  }
  const Status status = wait(table, epoch, signature);
  if (status == kDone) receive(table, c, epoch);
  return status;
}

}  // namespace dcp
