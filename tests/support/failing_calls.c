/* Calls of the operating system that fail, raise, answer late or short, for files below
   one folder; or copies of that folder before calls, as a kill would leave it.

   Preloaded into a process (LD_PRELOAD); failing_calls.py says what happens, by
   `failing_arm`. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PASS, FAIL, LATE, SHORT, RAISE, KILL, COPY };

static char folder[4096], copies[4096], trace[1 << 16];
static atomic_int is_armed, count;
static int target, action, code;
static __thread int is_inside;

void failing_arm(const char *path, const char *to, int at, int how, int error) {
    snprintf(folder, sizeof folder, "%s", path);
    snprintf(copies, sizeof copies, "%s", to);
    target = at, action = how, code = error, trace[0] = 0;
    count = 0;
    is_armed = 1;
}

int failing_disarm(void) {
    is_armed = 0;
    return count;
}

const char *failing_trace(void) { return trace; }

static int is_below(const char *path) {
    size_t length = strlen(folder);
    return !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static void copy_folder(int number) {
    char to[8192];
    snprintf(to, sizeof to, "%s/%d", copies, number);
    char *words[] = {"cp", "-a", folder, to, NULL}, *empty[] = {NULL};
    pid_t child;
    if (!posix_spawnp(&child, "cp", NULL, NULL, words, empty)) waitpid(child, NULL, 0);
}

/* Return what is to happen in this call, on a path or (if that is NULL) a descriptor. */
static int look(const char *name, const char *path, int descriptor) {
    char link[64], found[4096];
    if (!is_armed || is_inside) return PASS;
    if (!path) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        long size = syscall(SYS_readlink, link, found, sizeof found - 1);
        if (size < 0) return PASS;
        found[size] = 0, path = found;
    }
    if (!is_below(path)) return PASS;
    int number = ++count;
    size_t used = strlen(trace);
    snprintf(trace + used, sizeof trace - used, "%s %s\n", name, path + strlen(folder));
    if (action == COPY) {
        if (number % target) return PASS;
        is_inside = 1;
        copy_folder(number);
        is_inside = 0;
        return PASS;
    }
    if (number != target) return PASS;
    if (action == RAISE) kill(getpid(), SIGINT);
    if (action == KILL) kill(getpid(), SIGKILL);
    return action == RAISE ? PASS : action;
}

static int is_read_only(int file) {
    if (!is_armed || is_inside) return 0;
    return (syscall(SYS_fcntl, file, F_GETFL) & O_ACCMODE) == O_RDONLY;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
/* Defines a function that returns -1 (`failed`) and sets errno where it fails. */
#define WRAP(type, failed, name, parameters, arguments, path, descriptor)        \
    type name parameters {                                                       \
        int how = look(#name, path, descriptor);                                 \
        if (how == FAIL) {                                                       \
            errno = code;                                                        \
            return failed;                                                       \
        }                                                                        \
        type result = NEXT(name) arguments;                                      \
        if (how == LATE) {                                                       \
            errno = code;                                                        \
            return failed;                                                       \
        }                                                                        \
        return result;                                                           \
    }
#define BY_PATH(name, parameters, arguments) \
    WRAP(int, -1, name, parameters, arguments, path, -1)
#define BY_FILE(type, name, parameters, arguments) \
    WRAP(type, -1, name, parameters, arguments, NULL, file)
/* Of data: fewer bytes than asked for */
#define DATA(name, parameters, arguments)                           \
    ssize_t name parameters {                                       \
        int how = look(#name, NULL, file);                          \
        if (how == FAIL) {                                          \
            errno = code;                                           \
            return -1;                                              \
        }                                                           \
        if (how == SHORT && size > 1) size = (size + 1) / 2;        \
        ssize_t result = NEXT(name) arguments;                      \
        if (how == LATE) {                                          \
            errno = code;                                           \
            return -1;                                              \
        }                                                           \
        return result;                                              \
    }

DATA(read, (int file, void *data, size_t size), (file, data, size))
DATA(write, (int file, const void *data, size_t size), (file, data, size))
DATA(pread64, (int file, void *data, size_t size, off64_t at), (file, data, size, at))
DATA(pwrite64, (int file, const void *data, size_t size, off64_t at),
     (file, data, size, at))
BY_FILE(int, fsync, (int file), (file))
BY_FILE(int, fdatasync, (int file), (file))
/* What was only read can be closed, always. */
WRAP(int, -1, close, (int file), (file), is_read_only(file) ? "" : NULL, file)
BY_FILE(int, ftruncate64, (int file, off64_t size), (file, size))
BY_FILE(int, fstat64, (int file, struct stat64 *status), (file, status))
BY_PATH(stat64, (const char *path, struct stat64 *status), (path, status))
BY_PATH(lstat64, (const char *path, struct stat64 *status), (path, status))
BY_PATH(fstatat64, (int at, const char *path, struct stat64 *status, int flags),
        (at, path, status, flags))
BY_PATH(access, (const char *path, int mode), (path, mode))
BY_PATH(unlink, (const char *path), (path))
BY_PATH(unlinkat, (int at, const char *path, int flags), (at, path, flags))
BY_PATH(mkdir, (const char *path, mode_t mode), (path, mode))
BY_PATH(rename, (const char *path, const char *to), (path, to))
BY_PATH(link, (const char *path, const char *to), (path, to))
BY_PATH(linkat, (int at, const char *path, int to_at, const char *to, int flags),
        (at, path, to_at, to, flags))
BY_PATH(symlink, (const char *to, const char *path), (to, path))
BY_PATH(chmod, (const char *path, mode_t mode), (path, mode))
WRAP(DIR *, NULL, opendir, (const char *path), (path), path, -1)

ssize_t preadv64v2(int file, const struct iovec *parts, int n, off64_t at, int flags) {
    int how = look("preadv64v2", NULL, file);
    if (how == FAIL) {
        errno = code;
        return -1;
    }
    struct iovec half = parts[0];
    if (how == SHORT && half.iov_len > 1) {
        half.iov_len = (half.iov_len + 1) / 2;
        return NEXT(preadv64v2)(file, &half, 1, at, flags);
    }
    ssize_t result = NEXT(preadv64v2)(file, parts, n, at, flags);
    if (how == LATE) {
        errno = code;
        return -1;
    }
    return result;
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    int how = look("open64", path, -1);
    if (how == FAIL) {
        errno = code;
        return -1;
    }
    int result = NEXT(open64)(path, flags, mode);
    if (how == LATE && result >= 0) {
        close(result);
        errno = code;
        return -1;
    }
    return result;
}

int fcntl64(int file, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    int how = look("fcntl64", NULL, file);
    if (how == FAIL) {
        errno = code;
        return -1;
    }
    return NEXT(fcntl64)(file, command, argument);
}
