// NVRTC: CUDA C++ is compiled by g++. A "cubin" is a shared library.

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "emulator.h"

extern char** environ;

namespace {

namespace fs = std::filesystem;

enum NvrtcStatus { nvrtc_success = 0, nvrtc_invalid_input = 3, nvrtc_compilation = 6 };

struct Program {
    std::string source, log, code;
};

std::string read(const fs::path& path)
{
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// Run a command with its output in a file; return whether it ended well
bool run(const std::vector<std::string>& command, const fs::path& output)
{
    std::vector<char*> words;
    for (const auto& word : command)
        words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 2, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC,
                                     0600);
    pid_t child;
    int status = -1;
    if (!posix_spawnp(&child, words[0], &actions, nullptr, words.data(), environ))
        waitpid(child, &status, 0);
    posix_spawn_file_actions_destroy(&actions);
    return status == 0;
}

// Return a line for each kernel of a source
std::string list_kernels(const std::string& source, bool loops_over_grid)
{
    static const std::regex kernel(
        R"(__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\()");
    const bool has_barriers = source.find("__syncthreads") != std::string::npos;
    std::set<std::string> names;
    for (std::sregex_iterator found(source.begin(), source.end(), kernel), end; found != end;
         ++found)
        names.insert((*found)[1]);
    std::string lines;
    for (const auto& name : names)
        lines += "\nEMULATED_KERNEL(" + name + ", " + (has_barriers ? "true" : "false") + ", "
            + (loops_over_grid ? "true" : "false") + ")";
    return lines + "\n";
}

bool compile(Program& program, const std::vector<std::string>& options, const fs::path& folder)
{
    const fs::path own = fs::path(folder_of_emulator()) / "kernel";
    std::vector<std::string> command{
        "g++", "-x", "c++", "-O1", "-w", "-fPIC", "-std=c++17", "-I" + own.string()};
    for (const auto& option : options) {
        const bool is_kept = option.rfind("-I", 0) == 0 || option.rfind("-D", 0) == 0;
        if (is_kept)
            command.push_back(option);
    }
    const fs::path from = folder / "kernel.cu", to = folder / "kernel.so", log = folder / "log";
    const auto step = [&](const std::vector<std::string>& more) {
        auto all = command;
        all.insert(all.end(), more.begin(), more.end());
        const bool is_done = run(all, log);
        program.log = read(log);
        return is_done;
    };
    const bool is_of_cupy = program.source.find("#include <cupy/") != std::string::npos;
    std::string source = program.source, expanded = program.source;
    if (!is_of_cupy) {
        // Names of kernels may be made by macros
        std::ofstream(from) << source;
        if (!step({"-E", "-P", "-D__global__=__global__", "-D__syncthreads=__syncthreads",
                   from, "-o", folder / "expanded"}))
            return false;
        expanded = read(folder / "expanded");
    }
    const auto has = [&](const char* text) { return source.find(text) != std::string::npos; };
    const bool loops = is_of_cupy && has("CUPY_FOR(") && !has("threadIdx") && !has("blockIdx")
        && !has("__syncthreads");
    // Memory of a block whose size a launch tells
    static const std::regex dynamic(R"(extern\s+__shared__\s+([\w\s]+?)\s+(\w+)\s*\[\s*\])");
    source = std::regex_replace(source, dynamic, "$1* $2 = ($1*)emulated.shared");
    std::ofstream(from) << source << list_kernels(expanded, loops);
    const char* header = is_of_cupy ? "cupy.h" : "cuda.h";
    if (!step({"-include", own / header, "-shared", "-fvisibility=hidden", from, "-o", to}))
        return false;
    program.code = read(to);
    return true;
}

}  // namespace

std::string folder_of_emulator()
{
    Dl_info info;
    dladdr(reinterpret_cast<void*>(folder_of_emulator), &info);
    return fs::canonical(info.dli_fname).parent_path().parent_path();
}

API NvrtcStatus nvrtcVersion(int* major, int* minor)
{
    *major = 13;
    *minor = 0;
    return nvrtc_success;
}

API const char* nvrtcGetErrorString(NvrtcStatus status)
{
    return status == nvrtc_compilation ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INVALID_INPUT";
}

API NvrtcStatus nvrtcCreateProgram(Program** program, const char* source, const char*, int headers,
                                   const char**, const char**)
{
    if (headers)
        return nvrtc_invalid_input;
    *program = new Program{source, "", ""};
    return nvrtc_success;
}

API NvrtcStatus nvrtcDestroyProgram(Program** program)
{
    delete *program;
    return nvrtc_success;
}

API NvrtcStatus nvrtcCompileProgram(Program* program, int count, const char** options)
{
    // CuPy compiles nothing to learn of the compiler's version
    if (program->source.empty())
        return nvrtc_success;
    std::string folder = (fs::temp_directory_path() / "cuda_emulator-XXXXXX").string();
    if (!mkdtemp(folder.data()))
        return nvrtc_invalid_input;
    const bool is_done = compile(*program, {options, options + count}, folder);
    fs::remove_all(folder);
    return is_done ? nvrtc_success : nvrtc_compilation;
}

#define GETTERS(NAME, FIELD)                                          \
    API NvrtcStatus nvrtcGet##NAME##Size(Program* program, size_t* size) \
    {                                                                 \
        *size = program->FIELD.size() + 1;                            \
        return nvrtc_success;                                         \
    }                                                                 \
    API NvrtcStatus nvrtcGet##NAME(Program* program, char* to)        \
    {                                                                 \
        std::memcpy(to, program->FIELD.c_str(), program->FIELD.size() + 1); \
        return nvrtc_success;                                         \
    }
GETTERS(PTX, code)
GETTERS(CUBIN, code)
GETTERS(ProgramLog, log)
