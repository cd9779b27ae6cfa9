// Settings, errors, and the current device of each thread.

#include <sys/resource.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "emulator.h"

namespace {

std::string variable(const char* name, const char* otherwise)
{
    const char* value = std::getenv(name);
    return value && *value ? value : otherwise;
}

Settings read_settings()
{
    Settings read{};
    read.devices = std::stoi(variable("CUDA_EMULATOR_DEVICES", "1"));
    read.has_ipc = variable("CUDA_EMULATOR_IPC", "1") != "0";
    read.seed = std::stoul(variable("CUDA_EMULATOR_SEED", "0"));
    const std::string streams = variable("CUDA_EMULATOR_STREAMS", "prompt");
    if (streams == "late")
        read.streams = Settings::late;
    else if (streams == "jitter")
        read.streams = Settings::jitter;
    else if (streams != "prompt")
        std::fprintf(stderr, "CUDA emulator: CUDA_EMULATOR_STREAMS=%s is none of prompt, "
                     "late, jitter\n", streams.c_str()), std::exit(1);
    return read;
}

std::atomic<Status> error{success};
thread_local int device_of_thread = -1;
std::atomic<bool> contexts_made[64];

}  // namespace

const Settings& settings()
{
    static const Settings read = read_settings();
    return read;
}

void fail(Status status, const std::string& message)
{
    std::fprintf(stderr, "CUDA emulator: %s\n", message.c_str());
    error = status;
}

Status check() { return error; }

int current_device()
{
    if (device_of_thread < 0)
        set_context(0);
    return device_of_thread;
}

bool has_context() { return device_of_thread >= 0; }

void set_context(int device)
{
    device_of_thread = device;
    if (device >= 0)
        make_context(device);
}

void make_context(int device) { contexts_made[device] = true; }

bool was_context_made(int device) { return contexts_made[device]; }
