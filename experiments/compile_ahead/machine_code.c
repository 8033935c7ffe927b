/* An NVRTC that hands on machine code where PTX is asked for, so that what CubeCL keeps needs no compiler of the
 * driver's. NVRTC_FILE names the real one. The README beside this says how it is built and used. */

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;

static void *real(const char *name) {
    static void *library;
    const char *file = getenv("NVRTC_FILE");
    if (!library && file) library = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
    void *function = library ? dlsym(library, name) : NULL;
    if (function) return function;
    fprintf(stderr, "NVRTC_FILE=%s has no %s: it has to name NVRTC's library\n", file ? file : "", name);
    exit(1);
}

#define HANDED_ON(as, types, ...) \
    { return ((Result(*) types)real(#as))(__VA_ARGS__); }

typedef void *Program;
typedef const char *const *Texts;

Result nvrtcVersion(int *major, int *minor) HANDED_ON(nvrtcVersion, (int *, int *), major, minor)
Result nvrtcCreateProgram(Program *program, const char *source, const char *name, int headers, Texts texts, Texts names)
    HANDED_ON(nvrtcCreateProgram, (Program *, const char *, const char *, int, Texts, Texts),
              program, source, name, headers, texts, names)
Result nvrtcDestroyProgram(Program *program)
    HANDED_ON(nvrtcDestroyProgram, (Program *), program)
Result nvrtcGetPTXSize(Program program, size_t *bytes)
    HANDED_ON(nvrtcGetCUBINSize, (Program, size_t *), program, bytes)
Result nvrtcGetPTX(Program program, char *code)
    HANDED_ON(nvrtcGetCUBIN, (Program, char *), program, code)
Result nvrtcGetProgramLogSize(Program program, size_t *bytes)
    HANDED_ON(nvrtcGetProgramLogSize, (Program, size_t *), program, bytes)
Result nvrtcGetProgramLog(Program program, char *text)
    HANDED_ON(nvrtcGetProgramLog, (Program, char *), program, text)

const char *nvrtcGetErrorString(Result result) {
    return ((const char *(*)(Result))real("nvrtcGetErrorString"))(result);
}

/* Line numbers of the source are left out: they are half of the machine code's file. */
Result nvrtcCompileProgram(Program program, int count, Texts options) {
    enum { MOST = 64 };
    const char *kept[MOST];
    int number = 0;
    if (count > MOST) {
        fprintf(stderr, "%d options are more than the %d that are handed on\n", count, MOST);
        exit(1);
    }
    for (int i = 0; i < count; i++)
        if (strcmp(options[i], "-lineinfo")) kept[number++] = options[i];
    return ((Result(*)(Program, int, Texts))real("nvrtcCompileProgram"))(program, number, kept);
}
