// What the parts of the emulator share: status codes, memory, streams.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

// cudaError_t and CUresult have the same values
enum Status : int {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    no_device = 100,
    invalid_device = 101,
    invalid_image = 200,
    invalid_context = 201,
    invalid_handle = 400,
    not_found = 500,
    not_ready = 600,
    illegal_address = 700,
    not_supported = 801,
};

// ---- settings, from environment variables

struct Settings {
    int devices;                           // CUDA_EMULATOR_DEVICES
    bool has_ipc;                          // CUDA_EMULATOR_IPC
    enum { prompt, late, jitter } streams;  // CUDA_EMULATOR_STREAMS
    unsigned seed;                         // CUDA_EMULATOR_SEED
};
const Settings& settings();

// ---- errors

// Print what went wrong, and let every later call fail, as after a fault on a GPU
void fail(Status status, const std::string& message);
// Return the error of `fail`, or success
Status check();

// ---- the current device of the calling thread

int current_device();  // makes a context, as calls of the runtime do
bool has_context();
void set_context(int device);  // -1: none
void make_context(int device);
bool was_context_made(int device);  // by any thread of this process

// ---- memory.cpp

constexpr size_t device_memory_bytes = size_t(8) << 30;

enum class Origin { plain, pool, process };  // cudaMalloc, cudaMallocAsync, another process

struct Allocation {
    char* address;
    size_t size;
    int device;
    Origin origin;
    uint64_t id;
};

struct IpcHandle {
    char bytes[64];
};

Status allocate(size_t size, Origin origin, void** address);
Status release(void* address, Origin origin);
Status export_memory(const void* address, IpcHandle* handle);
Status open_memory(const IpcHandle& handle, void** address);
size_t memory_in_use(int device);

// The allocation that holds all of `size` bytes from `address` on
std::optional<Allocation> find_allocation(const void* address, size_t size = 1);
bool is_device_address(const void* address);
// Where the emulator itself reads and writes memory: of a GPU through a second map
char* alias(const void* address);
// Let threads of this process touch an allocation where the GPU sees it, or not
void expose(const Allocation& allocation, bool is_exposed);

Status allocate_page_locked(size_t size, void** address);
Status release_page_locked(void* address);
Status lock_pages(void* address, size_t size);
Status unlock_pages(void* address);
bool is_page_locked(const void* address, size_t size = 1);

// Copy in the order of a stream; `is_async`: as cudaMemcpyAsync
enum CopyKind { host_to_host, host_to_device, device_to_host, device_to_device, any_kind };
Status copy(void* to, const void* from, size_t size, int kind, void* stream, bool is_async);
Status fill(void* to, int byte, size_t size, void* stream);

// ---- streams.cpp

struct Stream;

// When the first `number` operations of a stream are done
struct Point {
    std::shared_ptr<Stream> stream;
    uint64_t number = 0;
};

using Work = std::function<void()>;

// The stream of a handle, of the current device if it is a default stream; or null
std::shared_ptr<Stream> find_stream(void* handle);
int device_of(const Stream& stream);
Point enqueue(const std::shared_ptr<Stream>& stream, Work work, std::vector<Point> after = {});
void wait_for(const Point& point);
void wait_for_device(int device);  // -1: for all

// ---- kernels.cpp, compiler.cpp

Status load_module(const void* image, void** module);
Status find_kernel(void* module, const char* name, void** kernel);
Status launch(void* kernel, const unsigned grid[3], const unsigned block[3],
              size_t shared_bytes, void* stream, void** arguments);
std::string folder_of_emulator();
