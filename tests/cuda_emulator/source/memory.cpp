// Memory of GPUs, page-locked memory, and copies.
//
// The memory of a process's GPUs is one file in memory. It is mapped twice: where
// programs believe it to be, without access, so that a host thread that touches it
// crashes as it does on hardware; and at a constant distance, which only the emulator
// uses. Addresses are never used again, so that freed memory stays without access.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "emulator.h"

namespace {

constexpr size_t range_bytes = size_t(1) << 39;
constexpr size_t page_bytes = 4096;
constexpr uint32_t handle_mark = 0x43554d45;

// What an IpcHandle holds
struct Exported {
    uint32_t mark;
    pid_t process;
    int file;
    int device;
    size_t place;  // in the file
    size_t size;
    uint64_t id;
};

size_t round_up(size_t size) { return (size + page_bytes - 1) / page_bytes * page_bytes; }

struct Memory {
    std::mutex mutex;
    int file;
    char* base;  // the alias is at base + range_bytes
    size_t used = page_bytes;
    uint64_t last_id = 0;
    std::map<const char*, Allocation> allocations;  // by address
    std::map<uint64_t, int> times_opened;           // by id, of other processes' memory
    std::map<const char*, size_t> page_locked;      // sizes, by address

    Memory()
    {
        file = memfd_create("gpu", MFD_CLOEXEC);
        void* both = mmap(nullptr, 2 * range_bytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (file < 0 || ftruncate(file, range_bytes) || both == MAP_FAILED) {
            std::perror("CUDA emulator: there are no addresses for the memory of a GPU");
            std::abort();
        }
        base = static_cast<char*>(both);
    }

    bool map(char* address, size_t size, int from, size_t place)
    {
        const int flags = MAP_SHARED | MAP_FIXED;
        return mmap(address, size, PROT_NONE, flags, from, place) != MAP_FAILED
            && mmap(address + range_bytes, size, PROT_READ | PROT_WRITE, flags, from,
                    place) != MAP_FAILED;
    }

    void unmap(const Allocation& allocation)
    {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        for (char* address : {allocation.address, allocation.address + range_bytes})
            mmap(address, round_up(allocation.size), PROT_NONE, flags, -1, 0);
    }

    // Addresses for `size` bytes, with pages without access behind them
    char* take_addresses(size_t size)
    {
        char* address = base + used;
        used += round_up(size) + page_bytes;
        return used <= range_bytes ? address : nullptr;
    }
};

Memory& memory()
{
    static Memory* only = new Memory;  // threads may use it until the process ends
    return *only;
}

using Lock = std::lock_guard<std::mutex>;

}  // namespace

bool is_device_address(const void* address)
{
    const char* place = static_cast<const char*>(address);
    return place >= memory().base && place < memory().base + range_bytes;
}

char* alias(const void* address)
{
    char* place = static_cast<char*>(const_cast<void*>(address));
    return is_device_address(address) ? place + range_bytes : place;
}

std::optional<Allocation> find_allocation(const void* address, size_t size)
{
    const char* place = static_cast<const char*>(address);
    Lock lock(memory().mutex);
    auto after = memory().allocations.upper_bound(place);
    if (after == memory().allocations.begin())
        return {};
    const Allocation& found = std::prev(after)->second;
    const size_t offset = place - found.address;
    if (offset > found.size || size > found.size - offset)
        return {};
    return found;
}

void expose(const Allocation& allocation, bool is_exposed)
{
    mprotect(allocation.address, round_up(allocation.size),
             is_exposed ? PROT_READ | PROT_WRITE : PROT_NONE);
}

size_t memory_in_use(int device)
{
    Lock lock(memory().mutex);
    size_t sum = 0;
    for (const auto& [address, allocation] : memory().allocations)
        sum += allocation.device == device ? allocation.size : 0;
    return sum;
}

Status allocate(size_t size, Origin origin, void** address)
{
    const int device = current_device();
    *address = nullptr;
    if (!size)
        return success;
    if (memory_in_use(device) + size > device_memory_bytes)
        return out_of_memory;
    Memory& all = memory();
    Lock lock(all.mutex);
    char* place = all.take_addresses(size);
    if (!place || !all.map(place, round_up(size), all.file, place - all.base))
        return out_of_memory;
    all.allocations[place] = {place, size, device, origin, ++all.last_id};
    // What nobody has written is not zero
    std::memset(place + range_bytes, 0xa5, std::min(size, size_t(1) << 16));
    *address = place;
    return success;
}

Status release(void* address, Origin origin)
{
    Memory& all = memory();
    Lock lock(all.mutex);
    auto found = all.allocations.find(static_cast<char*>(address));
    if (found == all.allocations.end() || found->second.origin != origin)
        return invalid_value;
    const Allocation allocation = found->second;
    if (origin == Origin::process && --all.times_opened[allocation.id])
        return success;
    all.unmap(allocation);
    if (origin != Origin::process)  // other processes that have it mapped see zeros
        fallocate(all.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  allocation.address - all.base, round_up(allocation.size));
    all.allocations.erase(found);
    return success;
}

// ---- between processes

Status export_memory(const void* address, IpcHandle* handle)
{
    const auto allocation = find_allocation(address);
    if (!settings().has_ipc)
        return not_supported;
    if (!allocation || allocation->origin != Origin::plain)
        return invalid_value;
    const Exported exported{handle_mark, getpid(), memory().file, allocation->device,
                            size_t(allocation->address - memory().base),
                            allocation->size, allocation->id};
    static_assert(sizeof exported <= sizeof *handle);
    *handle = {};
    std::memcpy(handle, &exported, sizeof exported);
    return success;
}

Status open_memory(const IpcHandle& handle, void** address)
{
    Exported exported;
    std::memcpy(&exported, &handle, sizeof exported);
    if (!settings().has_ipc)
        return not_supported;
    if (exported.mark != handle_mark)
        return invalid_value;
    if (exported.process == getpid())
        return invalid_context;
    Memory& all = memory();
    Lock lock(all.mutex);
    const uint64_t id = uint64_t(exported.process) << 32 | exported.id;
    for (const auto& [place, allocation] : all.allocations)
        if (allocation.origin == Origin::process && allocation.id == id) {
            ++all.times_opened[id];
            *address = allocation.address;
            return success;
        }
    const std::string path = "/proc/" + std::to_string(exported.process) + "/fd/"
        + std::to_string(exported.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0)
        return invalid_value;
    char* place = all.take_addresses(exported.size);
    const bool is_mapped
        = place && all.map(place, round_up(exported.size), file, exported.place);
    close(file);
    if (!is_mapped)
        return out_of_memory;
    all.allocations[place] = {place, exported.size, exported.device, Origin::process, id};
    all.times_opened[id] = 1;
    *address = place;
    return success;
}

// ---- page-locked memory of the host

Status lock_pages(void* address, size_t size)
{
    current_device();  // pages are locked for a context
    Lock lock(memory().mutex);
    memory().page_locked[static_cast<char*>(address)] = size;
    return success;
}

Status unlock_pages(void* address)
{
    Lock lock(memory().mutex);
    return memory().page_locked.erase(static_cast<char*>(address)) ? success : invalid_value;
}

bool is_page_locked(const void* address, size_t size)
{
    const char* place = static_cast<const char*>(address);
    Lock lock(memory().mutex);
    auto after = memory().page_locked.upper_bound(place);
    if (after == memory().page_locked.begin())
        return false;
    const auto& [start, length] = *std::prev(after);
    return size_t(place - start) <= length && size <= length - (place - start);
}

Status allocate_page_locked(size_t size, void** address)
{
    *address = nullptr;
    if (!size)
        return success;
    void* place = mmap(nullptr, round_up(size), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED)
        return out_of_memory;
    *address = place;
    return lock_pages(place, size);
}

Status release_page_locked(void* address)
{
    size_t size;
    {
        Lock lock(memory().mutex);
        auto found = memory().page_locked.find(static_cast<char*>(address));
        if (found == memory().page_locked.end())
            return invalid_value;
        size = found->second;
        memory().page_locked.erase(found);
    }
    munmap(address, round_up(size));
    return success;
}

// ---- copies

namespace {

enum class Side { device, page_locked, pageable, nowhere };

Side side_of(const void* address, size_t size)
{
    if (is_device_address(address))
        return find_allocation(address, size) ? Side::device : Side::nowhere;
    return is_page_locked(address, size) ? Side::page_locked : Side::pageable;
}

// Do it on memory that is there still
void copy_now(void* to, const void* from, size_t size)
{
    for (const void* address : {static_cast<const void*>(to), from})
        if (side_of(address, size) == Side::nowhere)
            return fail(illegal_address, "memory was freed while a copy was under way");
    std::memmove(alias(to), alias(from), size);
}

bool fits(int kind, Side to, Side from)
{
    const bool to_device = to == Side::device, from_device = from == Side::device;
    return kind == any_kind || kind == (from_device ? 2 : 0) + (to_device ? 1 : 0);
}

}  // namespace

Status copy(void* to, const void* from, size_t size, int kind, void* handle, bool is_async)
{
    const auto stream = find_stream(handle);
    if (!stream)
        return invalid_handle;
    if (!size)
        return check();
    const Side target = side_of(to, size), source = side_of(from, size);
    if (target == Side::nowhere || source == Side::nowhere || !fits(kind, target, source))
        return invalid_value;
    const bool is_staged = source == Side::pageable && target == Side::device;
    // cudaMemcpy waits for the stream before it reads pageable memory
    if (is_staged && !is_async)
        wait_for(enqueue(stream, [] {}));
    Work work = [=] { copy_now(to, from, size); };
    if (is_staged) {
        const auto staged = std::make_shared<std::vector<char>>(
            static_cast<const char*>(from), static_cast<const char*>(from) + size);
        work = [=] { copy_now(to, staged->data(), size); };
    }
    const Point done = enqueue(stream, work);
    // CUDA's table of what is synchronous (API synchronization behavior)
    const bool is_between_devices = target == Side::device && source == Side::device;
    const bool is_done = is_async ? target == Side::pageable : !is_between_devices;
    if (is_done && !is_staged)
        wait_for(done);
    return check();
}

Status fill(void* to, int byte, size_t size, void* handle)
{
    const auto stream = find_stream(handle);
    if (!stream)
        return invalid_handle;
    if (size && side_of(to, size) == Side::nowhere)
        return invalid_value;
    enqueue(stream, [=] {
        if (side_of(to, size) == Side::nowhere)
            return fail(illegal_address, "memory was freed while it was to be filled");
        std::memset(alias(to), byte, size);
    });
    return check();
}
