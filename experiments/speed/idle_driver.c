/* A CUDA driver and an NVRTC that do nothing, in the shape of an H200: they show what the host does for a training
 * or decoding step on a machine without a GPU. Every result reads as zeros.
 *
 *   gcc -O2 -shared -fPIC -o idle/libcuda.so experiments/speed/idle_driver.c
 *   ln -s libcuda.so idle/libcuda.so.1; ln -s libcuda.so idle/libnvrtc.so; mkdir -p idle/include
 *   LD_LIBRARY_PATH=idle CUDA_PATH=idle XDG_CACHE_HOME=idle LAUNCHES=launches.txt \
 *       target/release/examples/train_step --device cuda
 *
 * XDG_CACHE_HOME keeps the empty kernels out of the cache of real ones. LAUNCHES names a file for the number of
 * launches of each kernel. A launch that a real driver refuses, of no cubes or of too many units, is named on standard
 * error at once.
 *
 * With -DDRIVER_ALONE it has no NVRTC, so that a real one compiles: see ../compile_ahead. GPU_NAME names the GPU.
 *
 * LOSE_AT=n loses the device: the n-th call that reaches it fails, and so does every one after it, as with a real
 * driver, whose errors stay. LOSE_WITH is the CUresult they give, 719 where it is not named; with 2 the device is
 * there and has no more memory, and only requests for memory count and fail. LOSE_FOR=m has m calls fail and no more,
 * as real drivers do for a request that is too large. What a failed copy leaves reads as NaN. LOST names a file for
 * the number and name of the first call that failed, written as it fails, or for the number of calls in all. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef unsigned long long Pointer;

enum { MOST_KERNELS = 65536, NAME = 160 };
static struct { char name[NAME]; unsigned long launches; } kernels[MOST_KERNELS];
static uintptr_t known = 1; /* a handle is never null */
static Pointer unused = 1ULL << 46;
static void *const SOMETHING = (void *)0x1000;

enum { OUT_OF_MEMORY = 2, LAUNCH_FAILED = 719, NO_NUMBER = 255 };
static struct { unsigned long at, most; Result with; } loss;
static unsigned long calls;

static unsigned long number(const char *variable, unsigned long otherwise) {
    const char *text = getenv(variable);
    return text ? strtoul(text, NULL, 10) : otherwise;
}

__attribute__((constructor)) static void read_loss(void) {
    loss.at = number("LOSE_AT", 0);
    loss.most = number("LOSE_FOR", -1UL);
    loss.with = number("LOSE_WITH", LAUNCH_FAILED);
}

static void write_lost(unsigned long call, const char *name) {
    const char *path = getenv("LOST");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%lu %s\n", call, name);
    fclose(file);
}

/* The result of a call that reaches the device. */
static Result reach(const char *name, int for_memory) {
    if (loss.with == OUT_OF_MEMORY && !for_memory) return 0;
    unsigned long call = __sync_add_and_fetch(&calls, 1);
    if (!loss.at || call < loss.at || call - loss.at >= loss.most) return 0;
    if (call == loss.at) write_lost(call, name);
    return loss.with;
}

#define NOTHING(name, ...) Result name(__VA_ARGS__) { return 0; }
#define REACHES(name, ...) Result name(__VA_ARGS__) { return reach(#name, 0); }

NOTHING(cuInit, unsigned flags)
NOTHING(cuCtxSetCurrent, void *context)
NOTHING(cuDevicePrimaryCtxRelease_v2, int device)
REACHES(cuStreamDestroy_v2, void *stream)
REACHES(cuStreamSynchronize, void *stream)
REACHES(cuStreamWaitEvent, void *stream, void *event, unsigned flags)
REACHES(cuEventRecord, void *event, void *stream)
REACHES(cuEventSynchronize, void *event)
REACHES(cuEventQuery, void *event)
REACHES(cuEventDestroy_v2, void *event)
REACHES(cuMemFree_v2, Pointer memory)
REACHES(cuMemFreeAsync, Pointer memory, void *stream)
REACHES(cuMemcpyHtoDAsync_v2, Pointer to, const void *from, size_t bytes, void *stream)
REACHES(cuMemcpyDtoDAsync_v2, Pointer to, Pointer from, size_t bytes, void *stream)
REACHES(cuModuleUnload, void *module)
REACHES(cuFuncSetAttribute, void *kernel, int attribute, int value)

Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
Result cuDeviceGetCount(int *count) { *count = 1; return 0; }
Result cuDeviceGetName(char *name, int room, int device) {
    const char *given = getenv("GPU_NAME");
    snprintf(name, room, "%s", given ? given : "idle H200");
    return 0;
}
Result cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 150000000000; return 0; }
Result cuMemGetInfo_v2(size_t *left, size_t *all) { *left = *all = 150000000000; return reach(__func__, 0); }
Result cuDevicePrimaryCtxRetain(void **context, int device) { *context = SOMETHING; return 0; }
Result cuCtxGetCurrent(void **context) { *context = SOMETHING; return 0; }
Result cuStreamCreate(void **stream, unsigned flags) { *stream = SOMETHING; return reach(__func__, 0); }
Result cuEventCreate(void **event, unsigned flags) { *event = SOMETHING; return reach(__func__, 0); }
Result cuModuleLoadData(void **module, const void *image) { *module = SOMETHING; return reach(__func__, 0); }

/* What NVRTC asks a driver for, and does without. */
Result cuGetExportTable(const void **table, const void *id) { *table = NULL; return 1; }

/* CUresult by number, in the driver's own words. */
static const struct { Result result; const char *name, *text; } results[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};
enum { RESULTS = sizeof results / sizeof *results };

Result cuGetErrorName(Result result, const char **name) {
    for (int i = 0; i < RESULTS; i++)
        if (results[i].result == result) { *name = results[i].name; return 0; }
    return 1;
}
Result cuGetErrorString(Result result, const char **text) {
    for (int i = 0; i < RESULTS; i++)
        if (results[i].result == result) { *text = results[i].text; return 0; }
    return 1;
}

/* CUdevice_attribute by number. */
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 1: *value = 1024; break;             /* threads a block */
    case 2: case 3: *value = 1024; break;     /* its x and y */
    case 4: *value = 64; break;               /* its z */
    case 5: *value = 2147483647; break;       /* the grid's x */
    case 6: case 7: *value = 65535; break;    /* its y and z */
    case 8: *value = 49152; break;            /* shared memory a block, unasked */
    case 10: *value = 32; break;              /* a warp */
    case 16: *value = 132; break;             /* multiprocessors */
    case 75: *value = 9; break;               /* compute capability */
    case 76: *value = 0; break;
    case 97: *value = 232448; break;          /* shared memory a block, asked for */
    default: *value = 1;
    }
    return 0;
}

Result cuMemAlloc_v2(Pointer *memory, size_t bytes) {
    Result result = reach(__func__, 1);
    if (!result) *memory = __sync_fetch_and_add(&unused, (bytes + 511) / 512 * 512);
    return result;
}
Result cuMemAllocAsync(Pointer *memory, size_t bytes, void *stream) { return cuMemAlloc_v2(memory, bytes); }
Result cuMemAllocHost_v2(void **memory, size_t bytes) {
    Result result = reach(__func__, 0);
    if (result) return result;
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *memory ? 0 : 2;
}
Result cuMemFreeHost(void *memory) { free(memory); return 0; }

Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t bytes, void *stream) {
    Result result = reach(__func__, 0);
    memset(to, result ? NO_NUMBER : 0, bytes);
    return result;
}

/* CUDA_MEMCPY2D. */
struct Rows {
    size_t from_x, from_y; unsigned from_type; const void *from_host; Pointer from_device; void *from_array; size_t from_pitch;
    size_t to_x, to_y; unsigned to_type; void *to_host; Pointer to_device; void *to_array; size_t to_pitch;
    size_t bytes, rows;
};
Result cuMemcpy2DAsync_v2(const struct Rows *copy, void *stream) {
    Result result = reach(__func__, 0);
    for (size_t row = 0; copy->to_type == 1 && row < copy->rows; row++)
        memset((char *)copy->to_host + row * copy->to_pitch, result ? NO_NUMBER : 0, copy->bytes);
    return result;
}

Result cuModuleGetFunction(void **kernel, void *module, const char *name) {
    if (known == MOST_KERNELS) return 2;
    snprintf(kernels[known].name, NAME, "%s", name);
    *kernel = (void *)known++;
    return 0;
}

Result cuLaunchKernel(void *kernel, unsigned x, unsigned y, unsigned z, unsigned units_x, unsigned units_y, unsigned units_z,
                      unsigned shared, void *stream, void **arguments, void **extra) {
    unsigned long units = (unsigned long)units_x * units_y * units_z;
    if (!x || !y || !z || y > 65535 || z > 65535 || !units || units > 1024 || shared > 232448)
        fprintf(stderr, "refused: %s, %u x %u x %u cubes of %lu units, %u bytes shared\n",
                kernels[(uintptr_t)kernel].name, x, y, z, units, shared);
    kernels[(uintptr_t)kernel].launches++;
    return reach(__func__, 0);
}

#ifndef DRIVER_ALONE
Result nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
Result nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                          const char *const *names) { *program = SOMETHING; return 0; }
NOTHING(nvrtcCompileProgram, void *program, int options, const char *const *texts)
NOTHING(nvrtcDestroyProgram, void **program)
Result nvrtcGetPTXSize(void *program, size_t *bytes) { *bytes = 1; return 0; }
Result nvrtcGetPTX(void *program, char *text) { *text = 0; return 0; }
Result nvrtcGetProgramLogSize(void *program, size_t *bytes) { *bytes = 1; return 0; }
Result nvrtcGetProgramLog(void *program, char *text) { *text = 0; return 0; }
const char *nvrtcGetErrorString(Result result) { return "none"; }
#endif

__attribute__((destructor)) static void write_launches(void) {
    if (!loss.at) write_lost(calls, "calls");
    const char *path = getenv("LAUNCHES");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    for (uintptr_t n = 1; n < known; n++) fprintf(file, "%lu %s\n", kernels[n].launches, kernels[n].name);
    fclose(file);
}
