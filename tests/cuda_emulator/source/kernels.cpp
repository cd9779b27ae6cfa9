// Kernels: loading what compiler.cpp has made of them, and running their threads.
//
// One kernel of a process runs at a time. Its threads run one after the other; those of
// a block that meet (__syncthreads) have a stack each, and take turns.
//
// What a kernel is given as arguments points to where the GPU sees memory; before it
// runs, these are moved to where the emulator may read and write. Addresses that a kernel
// finds in memory are not: the first access faults, and the allocation is exposed until
// the kernel ends. An access to anything else ends the kernel as it does on a GPU.

#include <dlfcn.h>
#include <elf.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "../kernel/kernel.h"
#include "emulator.h"

namespace {

constexpr unsigned most_threads = 1024;
constexpr size_t stack_bytes = 256 << 10;

std::mutex& kernel_mutex = *new std::mutex;

// ---- faults of kernels

struct Running {
    sigjmp_buf escape;
    const void* fault = nullptr;
    std::vector<Allocation> exposed;
};
thread_local Running* running = nullptr;
struct sigaction handler_before;

void on_fault(int, siginfo_t* info, void*)
{
    if (!running) {
        sigaction(SIGSEGV, &handler_before, nullptr);  // which gets the same fault
        return;
    }
    if (is_device_address(info->si_addr))
        if (const auto allocation = find_allocation(info->si_addr)) {
            expose(*allocation, true);
            running->exposed.push_back(*allocation);
            return;
        }
    running->fault = info->si_addr;
    siglongjmp(running->escape, 1);
}

// Python's faulthandler may have taken the signal meanwhile
void take_faults()
{
    struct sigaction now{};
    sigaction(SIGSEGV, nullptr, &now);
    if (now.sa_sigaction == on_fault)
        return;
    handler_before = now;
    struct sigaction mine{};
    mine.sa_sigaction = on_fault;
    mine.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &mine, nullptr);
}

// ---- the threads of a block that meet

extern "C" void switch_stack(void** left, void* entered);
asm(R"(
switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

struct Fiber {
    char* stack = nullptr;
    void* top = nullptr;  // of the stack, while others run
    bool is_done = true;
};

struct Block {
    std::vector<Fiber> fibers{most_threads};
    Fiber* current = nullptr;
    void* scheduler = nullptr;
    const EmulatedKernel* kernel = nullptr;
    void** arguments = nullptr;
} block;  // the only one that runs

void begin_fiber()
{
    block.kernel->call(block.arguments);
    block.current->is_done = true;
    void* never;
    switch_stack(&never, block.scheduler);
}

void start(Fiber& fiber)
{
    if (!fiber.stack)
        fiber.stack = static_cast<char*>(mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    // Six registers, where to begin, and a word as if that had been called
    void** top = reinterpret_cast<void**>(fiber.stack + stack_bytes) - 8;
    std::memset(top, 0, 8 * sizeof *top);
    top[6] = reinterpret_cast<void*>(begin_fiber);
    fiber.top = top;
    fiber.is_done = false;
}

void meet() { switch_stack(&block.current->top, block.scheduler); }

template <typename Do>
void for_each(const unsigned size[3], EmulatedIndex& index, Do act)
{
    for (index.z = 0; index.z < size[2]; ++index.z)
        for (index.y = 0; index.y < size[1]; ++index.y)
            for (index.x = 0; index.x < size[0]; ++index.x)
                act();
}

void run_block(const EmulatedKernel& kernel, const unsigned size[3], void** arguments)
{
    EmulatedIndex& thread = kernel.place->thread;
    if (!kernel.has_barriers) {
        for_each(size, thread, [&] { kernel.call(arguments); });
        return;
    }
    block.kernel = &kernel;
    block.arguments = arguments;
    kernel.place->meet = meet;
    const unsigned count = size[0] * size[1] * size[2];
    for (unsigned i = 0; i < count; ++i)
        start(block.fibers[i]);
    for (bool is_done = false; !is_done;) {
        is_done = true;
        Fiber* fiber = block.fibers.data();
        for_each(size, thread, [&] {
            block.current = fiber++;
            if (!block.current->is_done)
                switch_stack(&block.scheduler, block.current->top);
            is_done = is_done && block.current->is_done;
        });
    }
}

// ---- launches

// A copy of the arguments of a launch
struct Launch {
    const EmulatedKernel* kernel;
    unsigned grid[3], block[3];
    std::vector<std::max_align_t> shared;
    std::vector<std::vector<char>> values;

    void run();
    bool translate();
};

bool may_be_host_address(uint64_t word)
{
    return word >= 0x500000000000 && word < 0x800000000000;
}

// Move addresses of the GPU's memory to where they can be used; return whether all are
bool Launch::translate()
{
    for (size_t argument = 0; argument < values.size(); ++argument) {
        if (!kernel->list[argument].may_hold_addresses)
            continue;
        for (size_t at = 0; at + 8 <= values[argument].size(); at += 8) {
            uint64_t word;
            char* place = values[argument].data() + at;
            std::memcpy(&word, place, 8);
            const void* address = reinterpret_cast<void*>(word);
            const char* what = nullptr;
            if (is_device_address(address)) {
                // An empty array may begin where an allocation ends
                if (!find_allocation(address, 0))
                    what = "which is not allocated";
                word = reinterpret_cast<uint64_t>(alias(address));
                std::memcpy(place, &word, 8);
            } else if (may_be_host_address(word) && !is_page_locked(address)) {
                what = "of the host, which is not page-locked";
            }
            if (what) {
                char text[200];
                std::snprintf(text, sizeof text, "kernel %s: argument %zu holds address %p, %s",
                              kernel->name, argument, address, what);
                fail(illegal_address, text);
                return false;
            }
        }
    }
    return true;
}

void Launch::run()
{
    std::lock_guard<std::mutex> lock(kernel_mutex);
    if (!translate())
        return;
    std::vector<void*> arguments;
    for (auto& value : values)
        arguments.push_back(value.data());
    EmulatedPlace& place = *kernel->place;
    // What loops over the grid does so whatever its size
    if (kernel->loops_over_grid)
        std::fill_n(grid, 3, 1), std::fill_n(block, 3, 1);
    place.grid = {grid[0], grid[1], grid[2]};
    place.block_size = {block[0], block[1], block[2]};
    place.shared = shared.data();
    take_faults();
    Running now;
    running = &now;
    if (!sigsetjmp(now.escape, 1)) {
        for_each(grid, place.block, [&] { run_block(*kernel, block, arguments.data()); });
    } else {
        char text[200];
        std::snprintf(text, sizeof text, "kernel %s used address %p, where there is nothing",
                      kernel->name, now.fault);
        fail(illegal_address, text);
    }
    running = nullptr;
    for (const Allocation& allocation : now.exposed)
        expose(allocation, false);
}

size_t length_of(const void* image)
{
    const auto* header = static_cast<const Elf64_Ehdr*>(image);
    if (std::memcmp(header->e_ident, ELFMAG, SELFMAG))
        return 0;
    return header->e_shoff + size_t(header->e_shnum) * header->e_shentsize;
}

}  // namespace

Status load_module(const void* image, void** module)
{
    const size_t length = length_of(image);
    char path[] = "/tmp/cuda_emulator-XXXXXX";
    const int file = length ? mkstemp(path) : -1;
    if (file < 0)
        return invalid_image;
    const bool is_written = write(file, image, length) == ssize_t(length);
    close(file);
    *module = is_written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!*module)
        std::fprintf(stderr, "CUDA emulator: %s\n", dlerror());
    unlink(path);
    return *module ? success : invalid_image;
}

Status find_kernel(void* module, const char* name, void** kernel)
{
    *kernel = dlsym(module, (std::string("emulated_") + name).c_str());
    return *kernel ? success : not_found;
}

Status launch(void* handle, const unsigned grid[3], const unsigned block[3], size_t shared_bytes,
              void* stream_handle, void** arguments)
{
    const auto* kernel = static_cast<const EmulatedKernel*>(handle);
    const auto stream = find_stream(stream_handle);
    if (!stream || device_of(*stream) != current_device())
        return invalid_handle;
    const size_t threads = size_t(block[0]) * block[1] * block[2];
    if (!threads || threads > most_threads || !grid[0] || !grid[1] || !grid[2])
        return invalid_value;
    auto launch = std::make_shared<Launch>();
    launch->kernel = kernel;
    std::memcpy(launch->grid, grid, sizeof launch->grid);
    std::memcpy(launch->block, block, sizeof launch->block);
    launch->shared.resize(shared_bytes / sizeof(std::max_align_t) + 1);
    for (size_t i = 0; i < kernel->count; ++i) {
        const char* value = static_cast<const char*>(arguments[i]);
        launch->values.emplace_back(value, value + kernel->list[i].size);
    }
    enqueue(stream, [launch] { launch->run(); });
    return check();
}
