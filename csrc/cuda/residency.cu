// What a launch asks of the device: how many blocks of a kernel may wait for each other (those
// that are resident together), and whether launches may overlap.

#include <map>
#include <mutex>
#include <tuple>

#include "launchers.h"

namespace dcp {

namespace {

struct Residency {
  uint32_t per_multiprocessor;
  uint32_t multiprocessors;
};

// Of a kernel on the current device; asked for once.
cudaError_t residency_of(const void* kernel, uint32_t threads, Residency* residency) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, uint32_t>, Residency> known;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_tuple(device, kernel, threads);
  auto found = known.find(key);
  if (found == known.end()) {
    int blocks = 0, multiprocessors = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel,
                                                          static_cast<int>(threads), 0);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    found = known
                .emplace(key, Residency{static_cast<uint32_t>(blocks),
                                        static_cast<uint32_t>(multiprocessors)})
                .first;
  }
  *residency = found->second;
  return cudaSuccess;
}

}  // namespace

cudaError_t find_room(const void* kernel, uint32_t threads, uint32_t share, uint32_t spare,
                      uint32_t max_blocks, Room* room) {
  Residency r{};
  const cudaError_t error = residency_of(kernel, threads, &r);
  if (error != cudaSuccess) return error;
  if (share == 0) share = 1;
  if (spare > r.multiprocessors / 2) spare = r.multiprocessors / 2;
  room->blocks = r.per_multiprocessor * (r.multiprocessors - spare) / share;
  // What is spared counts here: a launch that was let in early waits for the one ahead of it, all
  // of which is on the chip by then, so it keeps nobody away that anybody waits for.
  room->early = r.per_multiprocessor * r.multiprocessors / share / 2;
  if (max_blocks != 0 && max_blocks < room->blocks) room->blocks = max_blocks;
  return room->blocks < 2 ? cudaErrorCooperativeLaunchTooLarge : cudaSuccess;
}

cudaError_t launch_config(uint32_t blocks, uint32_t threads, cudaStream_t stream, bool overlap,
                          cudaLaunchAttribute* attribute, cudaLaunchConfig_t* config) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  *attribute = {};
  attribute->id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute->val.programmaticStreamSerializationAllowed = 1;
  *config = {};
  config->gridDim = dim3(blocks);
  config->blockDim = dim3(threads);
  config->stream = stream;
  config->attrs = attribute;
  config->numAttrs = overlap && major >= 9 ? 1 : 0;
  return cudaSuccess;
}

}  // namespace dcp
