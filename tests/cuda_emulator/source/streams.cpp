// Streams: each is a thread that does its operations one after the other.
//
// Late streams begin an operation only when somebody waits for it, so that a wait that is
// missing shows at once; or after a while, because a GPU goes on without being asked.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <random>
#include <thread>

#include "emulator.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto longest_delay = std::chrono::milliseconds(30);
constexpr size_t most_pending = 1000;  // then a launch waits, as on a GPU

// cudaStreamLegacy, cudaStreamPerThread
void* const legacy_handle = reinterpret_cast<void*>(1);
void* const per_thread_handle = reinterpret_cast<void*>(2);

std::mutex& mutex = *new std::mutex;  // of all that follows
using Lock = std::unique_lock<std::mutex>;

}  // namespace

struct Operation {
    Work work;
    std::vector<Point> after;  // what other streams must have done before
    Clock::time_point issued;
};

struct Stream {
    Stream(int device, bool is_blocking) : device(device), is_blocking(is_blocking) {}

    const int device;
    const bool is_blocking;  // takes turns with the legacy default stream
    std::deque<Operation> pending;
    uint64_t issued = 0, demanded = 0, done = 0;
    bool is_closed = false;
    std::condition_variable may_begin, has_ended;

    void demand(uint64_t number)
    {
        if (number > demanded) {
            demanded = number;
            may_begin.notify_one();
        }
    }

    void wait(uint64_t number, Lock& lock)
    {
        demand(number);
        has_ended.wait(lock, [&] { return done >= number; });
    }

    void run();
};

namespace {

struct Event {
    explicit Event(int device) : device(device) {}

    const int device;
    Point recorded;
    Clock::time_point time;
};

// Of the process; the mutex protects them
template <typename Key, typename Value>
using Table = std::map<Key, std::shared_ptr<Value>>;
Table<void*, Stream>& streams = *new Table<void*, Stream>;
Table<int, Stream>& legacy_streams = *new Table<int, Stream>;
Table<void*, Event>& events = *new Table<void*, Event>;

// A stream with its thread; to be called with the mutex
std::shared_ptr<Stream> start_stream(int device, bool is_blocking)
{
    auto stream = std::make_shared<Stream>(device, is_blocking);
    streams[stream.get()] = stream;
    std::thread([stream] {
        stream->run();
        Lock lock(mutex);
        streams.erase(stream.get());
    }).detach();
    return stream;
}

// Its thread ends after what it has to do
void close_stream(const std::shared_ptr<Stream>& stream)
{
    stream->is_closed = true;
    stream->demand(stream->issued);
    stream->may_begin.notify_one();
}

// The default streams of a thread, which end with it
struct PerThread {
    std::map<int, std::shared_ptr<Stream>> of_device;
    ~PerThread()
    {
        Lock lock(mutex);
        for (auto& [device, stream] : of_device)
            close_stream(stream);
    }
};
thread_local PerThread per_thread;

std::shared_ptr<Stream> legacy_stream(int device)
{
    auto& stream = legacy_streams[device];
    if (!stream)
        stream = start_stream(device, true);
    return stream;
}

// The streams that an operation of `stream` has to come after
std::vector<Point> turns_before(const std::shared_ptr<Stream>& stream)
{
    std::vector<Point> before;
    const auto legacy = legacy_stream(stream->device);
    if (stream == legacy) {
        for (const auto& [handle, other] : streams)
            if (other != legacy && other->is_blocking && other->device == stream->device
                && other->issued > other->done)
                before.push_back({other, other->issued});
    } else if (stream->is_blocking && legacy->issued > legacy->done) {
        before.push_back({legacy, legacy->issued});
    }
    return before;
}

Point last_of(const std::shared_ptr<Stream>& stream) { return {stream, stream->issued}; }

bool is_done(const Point& point)
{
    if (!point.stream)
        return true;
    point.stream->demand(point.number);  // who asks again and again waits
    return point.stream->done >= point.number;
}

// What an event stands for
Point recorded_by(const std::shared_ptr<Event>& event)
{
    Lock lock(mutex);
    return event->recorded;
}

std::shared_ptr<Event> find_event(void* handle)
{
    Lock lock(mutex);
    auto found = events.find(handle);
    return found == events.end() ? nullptr : found->second;
}

}  // namespace

void Stream::run()
{
    std::minstd_rand random(settings().seed + 1);
    Lock lock(mutex);
    for (;;) {
        may_begin.wait(lock, [&] { return !pending.empty() || is_closed; });
        if (pending.empty())
            return;
        if (settings().streams == Settings::late)
            may_begin.wait_until(lock, pending.front().issued + longest_delay,
                                 [&] { return demanded > done; });
        Operation operation = std::move(pending.front());
        pending.pop_front();
        for (const Point& point : operation.after)
            if (point.stream)
                point.stream->wait(point.number, lock);
        lock.unlock();
        if (settings().streams == Settings::jitter && random() % 4 == 0)
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
        if (operation.work && check() == success)
            operation.work();
        operation = {};
        lock.lock();
        ++done;
        has_ended.notify_all();
    }
}

std::shared_ptr<Stream> find_stream(void* handle)
{
    const int device = current_device();
    Lock lock(mutex);
    if (!handle || handle == legacy_handle)
        return legacy_stream(device);
    if (handle == per_thread_handle) {
        auto& stream = per_thread.of_device[device];
        if (!stream)
            stream = start_stream(device, true);
        return stream;
    }
    auto found = streams.find(handle);
    return found == streams.end() || found->second->is_closed ? nullptr : found->second;
}

int device_of(const Stream& stream) { return stream.device; }

Point enqueue(const std::shared_ptr<Stream>& stream, Work work, std::vector<Point> after)
{
    Lock lock(mutex);
    if (stream->pending.size() >= most_pending)
        stream->wait(stream->issued - most_pending / 2, lock);
    for (Point& point : turns_before(stream))
        after.push_back(std::move(point));
    stream->pending.push_back({std::move(work), std::move(after), Clock::now()});
    ++stream->issued;
    stream->may_begin.notify_one();
    return last_of(stream);
}

void wait_for(const Point& point)
{
    Lock lock(mutex);
    if (point.stream)
        point.stream->wait(point.number, lock);
}

void wait_for_device(int device)
{
    std::vector<Point> points;
    {
        Lock lock(mutex);
        for (const auto& [handle, stream] : streams)
            if (device < 0 || stream->device == device)
                points.push_back(last_of(stream));
    }
    for (const Point& point : points)
        wait_for(point);
}

// ---- calls on streams, which the runtime and the driver have in common

#define ALSO(NAME, OTHER) \
    extern "C" __attribute__((visibility("default"), alias(#OTHER))) decltype(OTHER) NAME;

constexpr unsigned stream_non_blocking = 1;

API Status cuStreamCreateWithPriority(void** handle, unsigned flags, int)
{
    const int device = current_device();
    Lock lock(mutex);
    *handle = start_stream(device, !(flags & stream_non_blocking)).get();
    return check();
}
ALSO(cudaStreamCreateWithPriority, cuStreamCreateWithPriority)

API Status cuStreamCreate(void** handle, unsigned flags)
{
    return cuStreamCreateWithPriority(handle, flags, 0);
}
ALSO(cudaStreamCreateWithFlags, cuStreamCreate)

API Status cudaStreamCreate(void** handle) { return cuStreamCreate(handle, 0); }

API Status cuStreamDestroy_v2(void* handle)
{
    const auto stream = find_stream(handle);
    if (!stream || stream.get() != handle)
        return invalid_handle;
    Lock lock(mutex);
    close_stream(stream);
    return check();
}
ALSO(cudaStreamDestroy, cuStreamDestroy_v2)

API Status cuStreamSynchronize(void* handle)
{
    const auto stream = find_stream(handle);
    if (!stream)
        return invalid_handle;
    // An operation of its own, so that the legacy stream waits for the others
    wait_for(enqueue(stream, nullptr));
    return check();
}
ALSO(cudaStreamSynchronize, cuStreamSynchronize)

API Status cuStreamQuery(void* handle)
{
    const auto stream = find_stream(handle);
    if (!stream)
        return invalid_handle;
    Lock lock(mutex);
    bool is_idle = is_done(last_of(stream));
    for (const Point& point : turns_before(stream))
        is_idle = is_done(point) && is_idle;
    return check() ? check() : is_idle ? success : not_ready;
}
ALSO(cudaStreamQuery, cuStreamQuery)

API Status cuStreamGetFlags(void* handle, unsigned* flags)
{
    const auto stream = find_stream(handle);
    if (!stream)
        return invalid_handle;
    *flags = stream->is_blocking ? 0 : stream_non_blocking;
    return success;
}
ALSO(cudaStreamGetFlags, cuStreamGetFlags)

API Status cudaStreamIsCapturing(void* handle, int* status)
{
    *status = 0;
    return find_stream(handle) ? success : invalid_handle;
}

API Status cudaLaunchHostFunc(void* handle, void (*function)(void*), void* data)
{
    const auto stream = find_stream(handle);
    if (!stream)
        return invalid_handle;
    enqueue(stream, [=] { function(data); });
    return check();
}

API Status cuStreamAddCallback(
    void* handle, void (*function)(void*, int, void*), void* data, unsigned)
{
    const auto stream = find_stream(handle);
    if (!stream)
        return invalid_handle;
    enqueue(stream, [=] { function(handle, success, data); });
    return check();
}
ALSO(cudaStreamAddCallback, cuStreamAddCallback)

// ---- events

API Status cuEventCreate(void** handle, unsigned)
{
    auto event = std::make_shared<Event>(current_device());
    Lock lock(mutex);
    *handle = event.get();
    events[*handle] = event;
    return check();
}
ALSO(cudaEventCreateWithFlags, cuEventCreate)

API Status cudaEventCreate(void** handle) { return cuEventCreate(handle, 0); }

API Status cuEventDestroy_v2(void* handle)
{
    Lock lock(mutex);
    return events.erase(handle) ? success : invalid_handle;
}
ALSO(cudaEventDestroy, cuEventDestroy_v2)

API Status cuEventRecord(void* handle, void* stream_handle)
{
    const auto event = find_event(handle);
    const auto stream = find_stream(stream_handle);
    if (!event || !stream || event->device != stream->device)
        return invalid_handle;
    const Point recorded = enqueue(stream, [event] { event->time = Clock::now(); });
    Lock lock(mutex);
    event->recorded = recorded;
    return check();
}
ALSO(cudaEventRecord, cuEventRecord)

API Status cuStreamWaitEvent(void* stream_handle, void* handle, unsigned)
{
    const auto event = find_event(handle);
    const auto stream = find_stream(stream_handle);
    if (!event || !stream)
        return invalid_handle;
    enqueue(stream, nullptr, {recorded_by(event)});
    return check();
}
ALSO(cudaStreamWaitEvent, cuStreamWaitEvent)

API Status cuEventQuery(void* handle)
{
    const auto event = find_event(handle);
    if (!event)
        return invalid_handle;
    Lock lock(mutex);
    return check() ? check() : is_done(event->recorded) ? success : not_ready;
}
ALSO(cudaEventQuery, cuEventQuery)

API Status cuEventSynchronize(void* handle)
{
    const auto event = find_event(handle);
    if (!event)
        return invalid_handle;
    wait_for(recorded_by(event));
    return check();
}
ALSO(cudaEventSynchronize, cuEventSynchronize)

API Status cuEventElapsedTime(float* milliseconds, void* first, void* last)
{
    const auto start = find_event(first), end = find_event(last);
    if (!start || !end)
        return invalid_handle;
    Lock lock(mutex);
    if (!is_done(start->recorded) || !is_done(end->recorded))
        return not_ready;
    *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
    return success;
}
ALSO(cudaEventElapsedTime, cuEventElapsedTime)

API Status cuCtxSynchronize()
{
    wait_for_device(current_device());
    return check();
}
ALSO(cudaDeviceSynchronize, cuCtxSynchronize)
