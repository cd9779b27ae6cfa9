// CUDA's driver and runtime: devices, contexts, and memory as both name it.

#include <cstring>

#include "emulator.h"

namespace {

// A handle of a context is the address of its device's number
int* const contexts = [] {
    int* numbers = new int[64];
    for (int i = 0; i < 64; ++i)
        numbers[i] = i;
    return numbers;
}();

bool is_initialized = false;
thread_local std::vector<int> pushed;

bool exists(int device) { return device >= 0 && device < settings().devices; }

void* context_of(int device) { return device < 0 ? nullptr : contexts + device; }

int device_of_context(void* context) { return context ? *static_cast<int*>(context) : -1; }

// cudaDeviceProp as in CUDA 13, as far as it is not zero
struct Properties {
    char name[256];
    char uuid[16];
    char luid[8];
    unsigned luid_mask;
    size_t total_memory, shared_memory_per_block;
    int registers_per_block, warp_size;
    size_t most_pitch;
    int threads_per_block, block_size[3], grid_size[3];
    size_t constant_memory;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
    int multiprocessors;
    char rest[1008 - 388];
};
static_assert(sizeof(Properties) == 1008);

void write_bus_id(char* text, int length, int device)
{
    std::snprintf(text, length, "0000:%02X:00.0", device + 1);
}

int attribute(int number)
{
    switch (number) {
    case 1: case 2: case 3: return 1024;            // threads of a block
    case 4: return 64;
    case 5: return 0x7fffffff;                      // blocks of a grid
    case 6: case 7: return 65535;
    case 8: return 48 << 10;                        // shared memory
    case 10: return 32;                             // threads of a warp
    case 16: return 4;                              // multiprocessors
    case 39: return 2048;                           // threads of one
    case 75: return 9;                              // compute capability 9.0
    case 15: case 19: case 40: case 41: case 115: return 1;  // copies beside kernels, pools
    default: return 0;
    }
}

}  // namespace

// ---- devices

API Status cuInit(unsigned)
{
    is_initialized = true;
    return settings().devices ? success : no_device;
}

API Status cuDriverGetVersion(int* version)
{
    *version = 13000;
    return success;
}
API Status cudaDriverGetVersion(int* version) { return cuDriverGetVersion(version); }
API Status cudaRuntimeGetVersion(int* version) { return cuDriverGetVersion(version); }

API Status cuDeviceGetCount(int* count)
{
    *count = settings().devices;
    return success;
}

API Status cudaGetDeviceCount(int* count)
{
    *count = settings().devices;
    return cuInit(0);
}

API Status cuDeviceGet(int* device, int index)
{
    *device = index;
    return exists(index) ? success : invalid_device;
}

API Status cuDeviceGetName(char* name, int length, int device)
{
    std::snprintf(name, length, "CUDA emulator");
    return exists(device) ? success : invalid_device;
}

API Status cuDeviceGetUuid_v2(char* uuid, int device)
{
    std::memset(uuid, 'e', 16);
    uuid[15] = 'a' + device;
    return exists(device) ? success : invalid_device;
}

API Status cuDeviceTotalMem_v2(size_t* size, int device)
{
    *size = device_memory_bytes;
    return exists(device) ? success : invalid_device;
}

API Status cudaDeviceGetAttribute(int* value, int number, int device)
{
    *value = attribute(number);
    return exists(device) ? success : invalid_device;
}
API Status cuDeviceGetAttribute(int* value, int number, int device)
{
    return cudaDeviceGetAttribute(value, number, device);
}

API Status cudaDeviceGetPCIBusId(char* text, int length, int device)
{
    write_bus_id(text, length, device);
    return exists(device) ? success : invalid_device;
}
API Status cuDeviceGetPCIBusId(char* text, int length, int device)
{
    return cudaDeviceGetPCIBusId(text, length, device);
}

API Status cudaGetDeviceProperties(Properties* properties, int device)
{
    *properties = {};
    cuDeviceGetName(properties->name, sizeof properties->name, device);
    cuDeviceGetUuid_v2(properties->uuid, device);
    properties->total_memory = device_memory_bytes;
    properties->shared_memory_per_block = attribute(8);
    properties->warp_size = attribute(10);
    properties->threads_per_block = attribute(1);
    for (int i = 0; i < 3; ++i) {
        properties->block_size[i] = attribute(2 + i);
        properties->grid_size[i] = attribute(5 + i);
    }
    properties->major = attribute(75);
    properties->multiprocessors = attribute(16);
    return exists(device) ? success : invalid_device;
}

API Status cudaDeviceCanAccessPeer(int* can, int device, int peer)
{
    *can = device != peer;
    return exists(device) && exists(peer) ? success : invalid_device;
}
API Status cuDeviceCanAccessPeer(int* can, int device, int peer)
{
    return cudaDeviceCanAccessPeer(can, device, peer);
}

API Status cudaDeviceEnablePeerAccess(int peer, unsigned)
{
    return exists(peer) ? success : invalid_device;
}

API Status cudaGetDevice(int* device)
{
    *device = has_context() ? current_device() : 0;
    return settings().devices ? success : no_device;
}

API Status cudaSetDevice(int device)
{
    if (!exists(device))
        return invalid_device;
    is_initialized = true;
    set_context(device);
    return check();
}

// ---- contexts

API Status cuDevicePrimaryCtxRetain(void** context, int device)
{
    if (!is_initialized || !exists(device))
        return is_initialized ? invalid_device : not_initialized;
    make_context(device);
    *context = context_of(device);
    return success;
}
API Status cuDevicePrimaryCtxRelease_v2(int) { return success; }

API Status cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active)
{
    if (!is_initialized || !exists(device))
        return is_initialized ? invalid_device : not_initialized;
    *flags = 0;
    *is_active = was_context_made(device);
    return success;
}

API Status cuCtxGetCurrent(void** context)
{
    *context = has_context() ? context_of(current_device()) : nullptr;
    return is_initialized || has_context() ? success : not_initialized;
}

API Status cuCtxSetCurrent(void* context)
{
    set_context(device_of_context(context));
    return success;
}

API Status cuCtxPushCurrent_v2(void* context)
{
    pushed.push_back(has_context() ? current_device() : -1);
    return cuCtxSetCurrent(context);
}

API Status cuCtxPopCurrent_v2(void** context)
{
    if (pushed.empty())
        return invalid_context;
    if (context)
        cuCtxGetCurrent(context);
    set_context(pushed.back());
    pushed.pop_back();
    return success;
}

API Status cuCtxGetDevice(int* device)
{
    if (!has_context())
        return is_initialized ? invalid_context : not_initialized;
    *device = current_device();
    return success;
}

API Status cuCtxGetId(void* context, unsigned long long* id)
{
    *id = device_of_context(context) + 1;
    return success;
}

// ---- errors

API const char* cudaGetErrorName(int status)
{
    switch (status) {
    case success: return "cudaSuccess";
    case invalid_value: return "cudaErrorInvalidValue";
    case out_of_memory: return "cudaErrorMemoryAllocation";
    case not_initialized: return "cudaErrorInitializationError";
    case no_device: return "cudaErrorNoDevice";
    case invalid_device: return "cudaErrorInvalidDevice";
    case invalid_image: return "cudaErrorInvalidKernelImage";
    case invalid_context: return "cudaErrorDeviceUninitialized";
    case invalid_handle: return "cudaErrorInvalidResourceHandle";
    case not_found: return "cudaErrorSymbolNotFound";
    case not_ready: return "cudaErrorNotReady";
    case illegal_address: return "cudaErrorIllegalAddress";
    case not_supported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
    }
}
API const char* cudaGetErrorString(int status) { return cudaGetErrorName(status); }

API Status cuGetErrorName(int status, const char** text)
{
    *text = cudaGetErrorName(status);
    return success;
}
API Status cuGetErrorString(int status, const char** text) { return cuGetErrorName(status, text); }

API Status cudaGetLastError() { return check(); }

// ---- memory

API Status cudaMalloc(void** address, size_t size)
{
    return check() ? check() : allocate(size, Origin::plain, address);
}
API Status cuMemAlloc_v2(void** address, size_t size)
{
    return size ? cudaMalloc(address, size) : invalid_value;
}

API Status cudaFree(void* address)
{
    wait_for_device(-1);
    return !address ? check() : check() ? check() : release(address, Origin::plain);
}
API Status cuMemFree_v2(void* address) { return cudaFree(address); }

API Status cudaMallocAsync(void** address, size_t size, void*)
{
    return check() ? check() : allocate(size, Origin::pool, address);
}

API Status cudaFreeAsync(void* address, void* handle)
{
    const auto stream = find_stream(handle);
    if (!stream)
        return invalid_handle;
    enqueue(stream, [=] { release(address, Origin::pool); });
    return check();
}

API Status cudaHostAlloc(void** address, size_t size, unsigned)
{
    return check() ? check() : allocate_page_locked(size, address);
}

API Status cudaFreeHost(void* address)
{
    wait_for_device(-1);
    return address ? release_page_locked(address) : success;
}

API Status cuMemHostRegister_v2(void* address, size_t size, unsigned)
{
    return lock_pages(address, size);
}
API Status cudaHostRegister(void* address, size_t size, unsigned)
{
    return lock_pages(address, size);
}
API Status cuMemHostUnregister(void* address) { return unlock_pages(address); }
API Status cudaHostUnregister(void* address) { return unlock_pages(address); }

API Status cudaMemGetInfo(size_t* free, size_t* total)
{
    *total = device_memory_bytes;
    *free = *total - memory_in_use(current_device());
    return check();
}

API Status cudaMemcpy(void* to, const void* from, size_t size, int kind)
{
    return copy(to, from, size, kind, nullptr, false);
}
API Status cuMemcpy(void* to, const void* from, size_t size)
{
    return copy(to, from, size, any_kind, nullptr, false);
}
API Status cuMemcpyHtoD_v2(void* to, const void* from, size_t size)
{
    return copy(to, from, size, host_to_device, nullptr, false);
}
API Status cuMemcpyDtoH_v2(void* to, const void* from, size_t size)
{
    return copy(to, from, size, device_to_host, nullptr, false);
}

API Status cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream)
{
    return copy(to, from, size, kind, stream, true);
}
API Status cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void* stream)
{
    return copy(to, from, size, device_to_device, stream, true);
}
API Status cuMemcpyAsync(void* to, const void* from, size_t size, void* stream)
{
    return copy(to, from, size, any_kind, stream, true);
}
API Status cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t size, void* stream)
{
    return copy(to, from, size, device_to_device, stream, true);
}

API Status cudaMemset(void* to, int byte, size_t size) { return fill(to, byte, size, nullptr); }
API Status cudaMemsetAsync(void* to, int byte, size_t size, void* stream)
{
    return fill(to, byte, size, stream);
}

// ---- memory of other processes

API Status cudaIpcGetMemHandle(IpcHandle* handle, void* address)
{
    return export_memory(address, handle);
}
API Status cuIpcGetMemHandle(IpcHandle* handle, void* address)
{
    return export_memory(address, handle);
}
API Status cudaIpcOpenMemHandle(void** address, IpcHandle handle, unsigned)
{
    return open_memory(handle, address);
}
API Status cuIpcOpenMemHandle_v2(void** address, IpcHandle handle, unsigned)
{
    return open_memory(handle, address);
}
API Status cudaIpcCloseMemHandle(void* address) { return release(address, Origin::process); }
API Status cuIpcCloseMemHandle(void* address) { return release(address, Origin::process); }

// ---- what an address is

struct PointerAttributes {
    int type;  // 0: not registered, 1: host, 2: device
    int device;
    void* device_pointer;
    void* host_pointer;
    long reserved[8];
};

API Status cudaPointerGetAttributes(PointerAttributes* attributes, void* address)
{
    *attributes = {};
    if (const auto allocation = find_allocation(address)) {
        attributes->type = 2;
        attributes->device = allocation->device;
        attributes->device_pointer = address;
    } else if (is_page_locked(address)) {
        attributes->type = 1;
        attributes->device_pointer = attributes->host_pointer = address;
    } else {
        attributes->device = -2;  // cudaInvalidDeviceId
        attributes->host_pointer = address;
    }
    return success;
}

API Status cuPointerGetAttribute(void* to, int attribute, void* address)
{
    const auto found = find_allocation(address);
    if (!found)
        return invalid_value;
    const auto write = [to](auto value) {
        std::memcpy(to, &value, sizeof value);
        return success;
    };
    switch (attribute) {
    case 1: return write(context_of(found->device));
    case 2: return write(2u);                 // memory of a device
    case 3: return write(address);
    case 7: return write(found->id);
    case 6: return write(1u);                 // copies are synchronous
    case 8: return write(0u);                 // not managed
    case 9: return write(found->device);
    case 10: return write(int(found->origin == Origin::plain));  // can be exported
    case 11: return write(found->address);
    case 12: return write(found->size);
    case 17: return write(static_cast<void*>(nullptr));  // of no pool
    default: return not_supported;
    }
}

API Status cuPointerGetAttributes(unsigned count, int* attributes, void** to, void* address)
{
    for (unsigned i = 0; i < count; ++i)
        if (cuPointerGetAttribute(to[i], attributes[i], address)) {
            const bool is_wide = attributes[i] == 1 || attributes[i] == 3 || attributes[i] == 7;
            std::memset(to[i], 0, is_wide ? 8 : 4);
        }
    return success;
}

API Status cuPointerSetAttribute(const void*, int, void*) { return success; }

API Status cuMemGetAddressRange_v2(void** base, size_t* size, void* address)
{
    const auto found = find_allocation(address);
    if (!found)
        return not_found;
    if (base)
        *base = found->address;
    if (size)
        *size = found->size;
    return success;
}

// ---- kernels

API Status cuModuleLoadData(void** module, const void* image) { return load_module(image, module); }
API Status cuModuleUnload(void*) { return success; }

API Status cuModuleGetFunction(void** kernel, void* module, const char* name)
{
    return find_kernel(module, name, kernel);
}

API Status cuLaunchKernel(void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, void* stream, void** arguments, void**)
{
    const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    return launch(kernel, grid, block, shared_bytes, stream, arguments);
}

API Status cuFuncGetAttribute(int* value, int number, void*)
{
    *value = number == 0 ? attribute(1) : 0;
    return success;
}

// ---- what Open MPI asks of memory that may be virtual, or of a pool: there is none

API Status cuMemRetainAllocationHandle(void*, void*) { return invalid_value; }
API Status cuMemRelease(void*) { return invalid_value; }
API Status cuMemGetAllocationPropertiesFromHandle(void*, void*) { return invalid_value; }
API Status cuMemGetAccess(void*, const void*, void*) { return invalid_value; }
API Status cuMemPoolGetAccess(void*, void*, const void*) { return invalid_value; }

// Open MPI sends the handles of events, but no process opens one
API Status cuIpcGetEventHandle(IpcHandle* handle, void*)
{
    *handle = {};
    return success;
}
