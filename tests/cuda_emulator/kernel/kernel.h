// What a compiled kernel and the emulator know of each other.
#pragma once

#include <cstddef>

struct EmulatedIndex {
    unsigned x, y, z;
};

// Where in its grid the thread is that runs
struct EmulatedPlace {
    EmulatedIndex thread, block, block_size, grid;
    void (*meet)();
    void* shared;  // as much as the launch tells
};

struct EmulatedArgument {
    size_t size;
    bool may_hold_addresses;
};

struct EmulatedKernel {
    const char* name;
    EmulatedPlace* place;
    size_t count;  // of arguments
    const EmulatedArgument* list;
    void (*call)(void** arguments);
    bool has_barriers;
    bool loops_over_grid;  // by CuPy's CUPY_FOR, and asks nothing else of its place
};
