// NCCL between processes of one machine, through a file in memory that all have mapped.
//
// Each rank has a slot in the file, and a stream's thread waits for those of other ranks.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "emulator.h"

namespace {

enum NcclStatus {
    nccl_success = 0,
    nccl_unhandled_cuda_error = 1,
    nccl_system_error = 2,
    nccl_invalid_argument = 4,
    nccl_invalid_usage = 5,
};

constexpr size_t slot_bytes = 256 << 10;
constexpr int most_ranks = 64;

// Names the file by the process that made it
struct UniqueId {
    pid_t process;
    int file;
    char rest[120];
};
static_assert(sizeof(UniqueId) == 128);

// The beginning of the file; it is zero at first
struct Header {
    std::atomic<int> arrived, round;
    int devices[most_ranks];
};

struct Communicator {
    int size, rank, device;
    Header* header;
    std::atomic<bool> is_aborted{false};
    Point last;  // what was launched, which comes before what is next, on any stream

    Communicator(int size, int rank, void* all)
        : size(size), rank(rank), device(current_device()), header(static_cast<Header*>(all))
    {
        header->devices[rank] = device;
    }
    ~Communicator() { munmap(header, length(size)); }

    static size_t length(int size) { return sizeof(Header) + size * slot_bytes; }

    char* slot(int of) { return reinterpret_cast<char*>(header + 1) + of * slot_bytes; }

    // Wait for all ranks; return false after an abort
    bool meet()
    {
        const int round = header->round;
        if (++header->arrived == size) {
            header->arrived = 0;
            ++header->round;
            return true;
        }
        while (header->round == round && !is_aborted)
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        return !is_aborted;
    }
};

// What the handle that programs have points to
struct Handle {
    std::shared_ptr<Communicator> communicator;
};

template <typename T>
void add(Communicator& all, void* to, size_t bytes)
{
    T* totals = static_cast<T*>(to);
    for (size_t i = 0; i < bytes / sizeof(T); ++i) {
        T total = reinterpret_cast<T*>(all.slot(0))[i];
        for (int rank = 1; rank < all.size; ++rank)
            total += reinterpret_cast<T*>(all.slot(rank))[i];
        totals[i] = total;
    }
}

struct Type {
    size_t size;
    void (*add)(Communicator&, void*, size_t);
};

// ncclDataType_t; numbers of 16 bits are not added up
const Type types[] = {
    {1, add<int8_t>}, {1, add<uint8_t>}, {4, add<int32_t>}, {4, add<uint32_t>},
    {8, add<int64_t>}, {8, add<uint64_t>}, {2, nullptr}, {4, add<float>}, {8, add<double>},
};

using Step = std::function<bool(size_t start, size_t bytes)>;

void in_steps(size_t size, const Step& step)
{
    for (size_t start = 0; start < size; start += slot_bytes)
        if (!step(start, std::min(slot_bytes, size - start)))
            return;
}

thread_local int group_depth = 0;
thread_local std::vector<std::function<void()>> group;

using Places = std::vector<std::pair<const void*, size_t>>;

// Launch it, or leave that to the end of the group
NcclStatus submit(Handle* handle, void* stream_handle, const Places& places,
                  std::function<void(Communicator&)> work)
{
    const auto stream = find_stream(stream_handle);
    if (!handle || !stream)
        return nccl_invalid_argument;
    for (const auto& [address, size] : places)
        if (size && !find_allocation(address, size))
            return nccl_invalid_argument;
    const auto all = handle->communicator;
    auto start = [=] { all->last = enqueue(stream, [=] { work(*all); }, {all->last}); };
    if (group_depth)
        group.push_back(start);
    else
        start();
    return check() ? nccl_unhandled_cuda_error : nccl_success;
}

}  // namespace

API NcclStatus ncclGetVersion(int* version)
{
    *version = 22703;
    return nccl_success;
}

API const char* ncclGetErrorString(NcclStatus status)
{
    switch (status) {
    case nccl_success: return "no error";
    case nccl_invalid_argument: return "invalid argument";
    case nccl_invalid_usage: return "invalid usage (Duplicate GPU detected)";
    default: return "unhandled error";
    }
}

API NcclStatus ncclGetUniqueId(UniqueId* id)
{
    *id = {};
    id->process = getpid();
    id->file = memfd_create("nccl", MFD_CLOEXEC);
    const bool is_made = !ftruncate(id->file, Communicator::length(most_ranks));
    return is_made ? nccl_success : nccl_system_error;
}

API NcclStatus ncclCommInitRankConfig(Handle** handle, int size, UniqueId id, int rank, void*)
{
    const auto path
        = "/proc/" + std::to_string(id.process) + "/fd/" + std::to_string(id.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (size > most_ranks || file < 0)
        return nccl_system_error;
    const size_t length = Communicator::length(size);
    void* all = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (all == MAP_FAILED)
        return nccl_system_error;
    const auto made = std::make_shared<Communicator>(size, rank, all);
    made->meet();
    if (id.process == getpid())
        close(id.file);
    for (int a = 0; a < size; ++a)
        for (int b = 0; b < a; ++b)
            if (made->header->devices[a] == made->header->devices[b])
                return nccl_invalid_usage;
    *handle = new Handle{made};
    return nccl_success;
}

API NcclStatus ncclCommDestroy(Handle* handle)
{
    delete handle;  // what is under way still has the communicator
    return nccl_success;
}

API NcclStatus ncclCommAbort(Handle* handle)
{
    handle->communicator->is_aborted = true;
    delete handle;
    return nccl_success;
}

API NcclStatus ncclCommGetAsyncError(Handle*, NcclStatus* error)
{
    *error = nccl_success;
    return nccl_success;
}

API NcclStatus ncclCommCount(Handle* handle, int* size)
{
    *size = handle->communicator->size;
    return nccl_success;
}

API NcclStatus ncclCommUserRank(Handle* handle, int* rank)
{
    *rank = handle->communicator->rank;
    return nccl_success;
}

API NcclStatus ncclCommCuDevice(Handle* handle, int* device)
{
    *device = handle->communicator->device;
    return nccl_success;
}

API NcclStatus ncclGroupStart()
{
    ++group_depth;
    return nccl_success;
}

API NcclStatus ncclGroupEnd()
{
    if (!group_depth)
        return nccl_invalid_usage;
    if (--group_depth)
        return nccl_success;
    for (const auto& start : group)
        start();
    group.clear();
    return nccl_success;
}

API NcclStatus ncclAllReduce(const void* send, void* receive, size_t count, unsigned type, int op,
                             Handle* handle, void* stream)
{
    const bool is_sum = op == 0;
    if (!is_sum || type >= std::size(types) || !types[type].add)
        return nccl_invalid_argument;
    const size_t size = count * types[type].size;
    const auto work = [=](Communicator& all) {
        in_steps(size, [&](size_t start, size_t bytes) {
            std::memcpy(all.slot(all.rank), alias(send) + start, bytes);
            if (!all.meet())
                return false;
            types[type].add(all, alias(receive) + start, bytes);
            return all.meet();
        });
    };
    return submit(handle, stream, {{send, size}, {receive, size}}, work);
}

API NcclStatus ncclBroadcast(const void* send, void* receive, size_t count, unsigned type, int root,
                             Handle* handle, void* stream)
{
    if (type >= std::size(types))
        return nccl_invalid_argument;
    const size_t size = count * types[type].size;
    const auto work = [=](Communicator& all) {
        in_steps(size, [&](size_t start, size_t bytes) {
            if (all.rank == root)
                std::memcpy(all.slot(root), alias(send) + start, bytes);
            if (!all.meet())
                return false;
            std::memcpy(alias(receive) + start, all.slot(root), bytes);
            return all.meet();
        });
    };
    const bool is_root = handle && handle->communicator->rank == root;
    return submit(handle, stream, {{send, is_root ? size : 0}, {receive, size}}, work);
}
