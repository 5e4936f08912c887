// Control blocks in shared memory, and the two halves of an exchange: publish and wait.
//
// Every rank owns one control block per micro-batch, mapped by all ranks. Call number `epoch` of a
// rank uses slot `epoch & 1`. A rank writes its payload and signature, then stores the epoch with
// release; a peer loads the epoch with acquire before it reads either. Two slots suffice: a rank
// writes slot e & 1 again in call e + 2, which follows the end of its call e + 1, in which it saw
// every peer's epoch e + 1, which each peer stored after it had finished reading call e.
// Epochs are compared for equality only, so that they may wrap.
//
// No torch headers here. Python reads the same bytes: dcp_inductor/runtime/layout.py.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dcp {

// Raised with every change of the bytes below or of the launch ops; checked after loading.
constexpr int64_t kProtocol = 2;
constexpr int kCacheLine = 64;
constexpr int kSignatureBytes = 256;
constexpr int kMaxRanks = 128;

enum Status : int64_t {
  kDone = 0,
  kPending = 1,   // a peer has not arrived within the patience of this call; call again to resume
  kMismatch = 2,  // a peer arrived with another signature
};

struct alignas(kCacheLine) Slot {
  std::atomic<uint32_t> epoch;
  alignas(8) unsigned char signature[kSignatureBytes];
};

struct alignas(kCacheLine) Control {
  uint64_t tag;                                    // written by Python when the block is created
  alignas(kCacheLine) uint32_t epoch;              // calls begun by this rank
  uint32_t fault_peer;                             // why the last call did not end in kDone
  uint32_t vain_spins;                             // in a row, and of this rank only
  alignas(kCacheLine) std::atomic<uint32_t> dead;  // this rank has given up on the group
  alignas(kCacheLine) std::atomic<uint32_t> sleepers;  // peers that sleep on a slot of this rank
  Slot slots[2];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "epochs live in shared memory");
static_assert(sizeof(Slot) == 320 && offsetof(Slot, signature) == 8, "see layout.py");
static_assert(sizeof(Control) == 896 && offsetof(Control, slots) == 256, "see layout.py");

// One rank's view of a workspace, as int64 words that Python fills in: the addresses at which this
// process has mapped every rank's control block, and every rank's payload arena after them.
struct Table {
  int64_t world_size;
  int64_t rank;
  int64_t spin_ns;      // busy-wait this long, then sleep
  int64_t patience_ns;  // return kPending after this long
  int64_t slot_bytes;   // of an arena
  int64_t addresses[];

  Control* control(int64_t peer) const { return reinterpret_cast<Control*>(addresses[peer]); }
  unsigned char* payload(int64_t peer, uint32_t epoch) const {
    return reinterpret_cast<unsigned char*>(addresses[world_size + peer]) +
           static_cast<int64_t>(epoch & 1) * slot_bytes;
  }
};

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps until `word` is woken, is not `seen` any more, or `limit_ns` have passed.
inline void sleep_on(const std::atomic<uint32_t>& word, uint32_t seen, int64_t limit_ns) {
#if defined(__linux__)
  const timespec limit{limit_ns / 1000000000, limit_ns % 1000000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  const timespec nap{0, limit_ns < 50000 ? limit_ns : 50000};
  nanosleep(&nap, nullptr);
#endif
}

inline void wake_all(const std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// How long to busy-wait. Spinning is the fastest wait while every rank has a processor, and the
// slowest while they share one, where it keeps the awaited rank from running: a few spins in vain
// make the next ones short, and a long one is tried now and then. (Yielding loses both ways: to
// sleeping where ranks share a processor, to spinning where they do not.)
inline int64_t spin_budget(const Table& table, uint32_t epoch) {
  constexpr uint32_t kVain = 4, kTryEvery = 16;
  const bool try_long = table.control(table.rank)->vain_spins < kVain || epoch % kTryEvery == 0;
  return try_long ? table.spin_ns : table.spin_ns / 32;
}

inline uint32_t begin(const Table& table) { return ++table.control(table.rank)->epoch; }

inline uint32_t current(const Table& table) { return table.control(table.rank)->epoch; }

inline void publish(const Table& table, uint32_t epoch, const unsigned char* signature) {
  Control& own = *table.control(table.rank);
  Slot& slot = own.slots[epoch & 1];
  std::memcpy(slot.signature, signature, kSignatureBytes);
  // Pairs with the acquire in wait(): payload and signature are visible before the epoch is.
  // Sequentially consistent with the sleepers: one that this load misses sees the new epoch.
  slot.epoch.store(epoch, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) wake_all(slot.epoch);
}

// Waits until every peer has published `epoch`, and compares their signatures with `signature`
// where one is given. A peer with another one is reported when all have arrived, or at the end of
// patience: so a caller that goes on after kMismatch has not run ahead of a peer by two calls.
// A wait without end is bounded by the caller, which counts the kPending it gets.
inline Status wait(const Table& table, uint32_t epoch, const unsigned char* signature) {
  bool arrived[kMaxRanks] = {};
  arrived[table.rank] = true;
  Control& own = *table.control(table.rank);
  const int64_t start = now_ns();
  const int64_t spin_ns = spin_budget(table, epoch);
  bool spun = false, slept = false;
  int64_t other = -1;
  for (;;) {
    int64_t missing = -1;
    for (int64_t peer = 0; peer < table.world_size; ++peer) {
      if (arrived[peer]) continue;
      const Slot& slot = table.control(peer)->slots[epoch & 1];
      if (slot.epoch.load(std::memory_order_acquire) != epoch) {
        missing = peer;
        continue;
      }
      arrived[peer] = true;
      if (signature && std::memcmp(slot.signature, signature, kSignatureBytes) != 0) other = peer;
    }
    if (missing < 0 && other < 0) {
      if (slept) {
        own.vain_spins += own.vain_spins < 1000;
      } else if (spun) {
        own.vain_spins = 0;
      }
      return kDone;
    }
    const int64_t waited = now_ns() - start;
    if (other >= 0 && (missing < 0 || waited >= table.patience_ns)) {
      own.fault_peer = static_cast<uint32_t>(other);
      return kMismatch;
    }
    if (waited < spin_ns) {
      spun = true;
      for (int i = 0; i < 8; ++i) relax();
    } else if (waited < table.patience_ns) {
      slept = true;
      Control& peer = *table.control(missing);
      std::atomic<uint32_t>& word = peer.slots[epoch & 1].epoch;
      peer.sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = word.load(std::memory_order_seq_cst);
      if (seen != epoch) sleep_on(word, seen, table.patience_ns - waited);
      peer.sleepers.fetch_sub(1, std::memory_order_relaxed);
    } else {
      own.fault_peer = static_cast<uint32_t>(missing);
      return kPending;
    }
  }
}

}  // namespace dcp
