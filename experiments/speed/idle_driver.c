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
 * error at once. */

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

#define NOTHING(name, ...) Result name(__VA_ARGS__) { return 0; }

NOTHING(cuInit, unsigned flags)
NOTHING(cuCtxSetCurrent, void *context)
NOTHING(cuDevicePrimaryCtxRelease_v2, int device)
NOTHING(cuStreamDestroy_v2, void *stream)
NOTHING(cuStreamSynchronize, void *stream)
NOTHING(cuStreamWaitEvent, void *stream, void *event, unsigned flags)
NOTHING(cuEventRecord, void *event, void *stream)
NOTHING(cuEventSynchronize, void *event)
NOTHING(cuEventQuery, void *event)
NOTHING(cuEventDestroy_v2, void *event)
NOTHING(cuMemFree_v2, Pointer memory)
NOTHING(cuMemFreeAsync, Pointer memory, void *stream)
NOTHING(cuMemcpyHtoDAsync_v2, Pointer to, const void *from, size_t bytes, void *stream)
NOTHING(cuMemcpyDtoDAsync_v2, Pointer to, Pointer from, size_t bytes, void *stream)
NOTHING(cuModuleUnload, void *module)
NOTHING(cuFuncSetAttribute, void *kernel, int attribute, int value)

Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
Result cuDeviceGetCount(int *count) { *count = 1; return 0; }
Result cuDeviceGetName(char *name, int room, int device) { snprintf(name, room, "idle H200"); return 0; }
Result cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 150000000000; return 0; }
Result cuMemGetInfo_v2(size_t *left, size_t *all) { *left = *all = 150000000000; return 0; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { *context = SOMETHING; return 0; }
Result cuCtxGetCurrent(void **context) { *context = SOMETHING; return 0; }
Result cuStreamCreate(void **stream, unsigned flags) { *stream = SOMETHING; return 0; }
Result cuEventCreate(void **event, unsigned flags) { *event = SOMETHING; return 0; }
Result cuModuleLoadData(void **module, const void *image) { *module = SOMETHING; return 0; }
Result cuGetErrorName(Result result, const char **name) { *name = "none"; return 0; }
Result cuGetErrorString(Result result, const char **text) { *text = "none"; return 0; }

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
    *memory = __sync_fetch_and_add(&unused, (bytes + 511) / 512 * 512);
    return 0;
}
Result cuMemAllocAsync(Pointer *memory, size_t bytes, void *stream) { return cuMemAlloc_v2(memory, bytes); }
Result cuMemAllocHost_v2(void **memory, size_t bytes) {
    *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *memory ? 0 : 2;
}
Result cuMemFreeHost(void *memory) { free(memory); return 0; }

Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t bytes, void *stream) { memset(to, 0, bytes); return 0; }

/* CUDA_MEMCPY2D. */
struct Rows {
    size_t from_x, from_y; unsigned from_type; const void *from_host; Pointer from_device; void *from_array; size_t from_pitch;
    size_t to_x, to_y; unsigned to_type; void *to_host; Pointer to_device; void *to_array; size_t to_pitch;
    size_t bytes, rows;
};
Result cuMemcpy2DAsync_v2(const struct Rows *copy, void *stream) {
    for (size_t row = 0; copy->to_type == 1 && row < copy->rows; row++)
        memset((char *)copy->to_host + row * copy->to_pitch, 0, copy->bytes);
    return 0;
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
    return 0;
}

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

__attribute__((destructor)) static void write_launches(void) {
    const char *path = getenv("LAUNCHES");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    for (uintptr_t n = 1; n < known; n++) fprintf(file, "%lu %s\n", kernels[n].launches, kernels[n].name);
    fclose(file);
}
