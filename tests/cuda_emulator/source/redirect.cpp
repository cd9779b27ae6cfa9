// CuPy's extension modules hold CUDA's runtime. Each of its functions is made to jump to
// the one of the same name here; and where there is none, to one that says so.

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>

#include <cctype>
#include <cstring>
#include <fstream>
#include <iterator>

#include "emulator.h"

namespace {

constexpr size_t page_bytes = 4096;

Status refuse(const char* name)
{
    std::fprintf(stderr, "CUDA emulator: there is no %s\n", name);
    return not_supported;
}

void append(std::string& code, const char* bytes, const void* address)
{
    code += bytes;
    code.append(reinterpret_cast<const char*>(&address), sizeof address);
}

// Machine code that calls `refuse` with a name, in memory that is never freed
const void* make_refusal(const char* name)
{
    static char* place = nullptr;
    static size_t room = 0;
    std::string code;
    append(code, "\x48\xbf", strdup(name));                               // mov rdi, name
    append(code, "\x48\xb8", reinterpret_cast<const void*>(refuse));       // mov rax, refuse
    code += "\xff\xe0";                                                   // jmp rax
    if (room < code.size()) {
        room = 16 * page_bytes;
        place = static_cast<char*>(mmap(nullptr, room, PROT_READ | PROT_WRITE | PROT_EXEC,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    }
    std::memcpy(place, code.data(), code.size());
    place += code.size();
    room -= code.size();
    return place - code.size();
}

void write_jump(char* function, const void* target)
{
    std::string code("\xff\x25\0\0\0\0", 6);  // jmp [rip + 0]
    append(code, "", target);
    char* page = function - reinterpret_cast<uintptr_t>(function) % page_bytes;
    const size_t length = function + code.size() - page;
    mprotect(page, length, PROT_READ | PROT_WRITE | PROT_EXEC);
    std::memcpy(function, code.data(), code.size());
    mprotect(page, length, PROT_READ | PROT_EXEC);
}

bool is_of_runtime(const char* name)
{
    return !std::strncmp(name, "cuda", 4) && std::isupper(name[4]);
}

}  // namespace

// Redirect what a module holds that is loaded; return how many functions
API int cuda_emulator_redirect(const char* path)
{
    link_map* map = nullptr;
    void* module = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    void* self = dlopen((folder_of_emulator() + "/lib/libcuda.so.1").c_str(), RTLD_NOW);
    if (!module || dlinfo(module, RTLD_DI_LINKMAP, &map))
        return -1;
    std::ifstream file(path, std::ios::binary);
    const std::string image{std::istreambuf_iterator<char>(file), {}};
    const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image.data());
    const auto* sections = reinterpret_cast<const Elf64_Shdr*>(image.data() + header->e_shoff);
    int count = 0;
    for (int i = 0; i < header->e_shnum; ++i) {
        if (sections[i].sh_type != SHT_SYMTAB)
            continue;
        const auto* symbols
            = reinterpret_cast<const Elf64_Sym*>(image.data() + sections[i].sh_offset);
        const char* names = image.data() + sections[sections[i].sh_link].sh_offset;
        for (size_t j = 0; j < sections[i].sh_size / sizeof *symbols; ++j) {
            const char* name = names + symbols[j].st_name;
            if (ELF64_ST_TYPE(symbols[j].st_info) != STT_FUNC || !is_of_runtime(name)
                || !symbols[j].st_value)
                continue;
            const void* target = dlsym(self, name);
            write_jump(reinterpret_cast<char*>(map->l_addr + symbols[j].st_value),
                       target ? target : make_refusal(name));
            ++count;
        }
    }
    return count;
}
