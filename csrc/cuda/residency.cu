// What a launch asks of the device: how many blocks of a kernel may wait for each other (those
// that are resident together), and whether launches may overlap.

#include <map>
#include <mutex>
#include <tuple>

#include "launchers.h"

namespace dcp {

cudaError_t resident_blocks(const void* kernel, uint32_t threads, uint32_t share,
                            uint32_t* blocks) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, uint32_t>, uint32_t> known;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_tuple(device, kernel, threads);
  auto found = known.find(key);
  if (found == known.end()) {
    int per_multiprocessor = 0, multiprocessors = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel,
                                                          static_cast<int>(threads), 0);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    found = known.emplace(key, per_multiprocessor * multiprocessors).first;
  }
  // Room for one more is left to an exchange of another group: see sync.cuh, "Deadlock".
  *blocks = share <= 1 ? found->second - 1 : found->second / share;
  return cudaSuccess;
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
