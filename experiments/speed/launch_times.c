/* A CUDA driver that hands everything on to the real one and times launches by events: which kernels a step waits for,
 * where a profiler is not to be had.
 *
 *   gcc -O2 -shared -fPIC -Wl,-soname,libcuda_times.so -Wl,--no-as-needed -o times/libcuda.so \
 *       experiments/speed/launch_times.c -l:libcuda.so.1 -ldl
 *   LD_LIBRARY_PATH=times SKIP=4000 COUNT=420 TIMES=times.txt target/release/train --config CONFIG --device cuda:0
 *
 * After SKIP launches it times COUNT of them and writes a line each to the file TIMES: the kernel's name, its cubes, units
 * of a cube, microseconds, and microseconds since the launch before it. Events add one or two microseconds to each.
 * With HOST=1 there are no events, and both times are the host's: inside the driver's launch, and since the one before
 * it returned, while the program made this one ready.
 * `times` has nothing else in it, so that the loader finds the real libcuda.so.1 where it always does. */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef int Result;
typedef void *Handle;

extern Result cuEventCreate(Handle *event, unsigned flags);
extern Result cuEventRecord(Handle event, Handle stream);
extern Result cuEventSynchronize(Handle event);

typedef Result Launch(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **);
static Launch *launch;
static Result (*elapsed)(float *, Handle, Handle);
static Result (*name_of)(const char **, Handle);

static struct { Handle kernel, before, after; double called, returned; unsigned cubes[3], units; } *timed;
static long launches, skip, count, host;

static long number(const char *variable) {
    const char *text = getenv(variable);
    return text ? atol(text) : 0;
}

static void begin(void) {
    Handle library = dlopen("libcuda.so.1", RTLD_NOW);
    launch = (Launch *)dlsym(library, "cuLaunchKernel");
    elapsed = (Result(*)(float *, Handle, Handle))dlsym(library, "cuEventElapsedTime");
    name_of = (Result(*)(const char **, Handle))dlsym(library, "cuFuncGetName");
    skip = number("SKIP");
    count = number("COUNT");
    host = number("HOST");
    timed = calloc(count + 1, sizeof *timed);
}

static float microseconds(Handle from, Handle to) {
    float milliseconds = 0;
    if (elapsed) elapsed(&milliseconds, from, to);
    return milliseconds * 1e3f;
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1e6 + at.tv_nsec / 1e3;
}

static float took(long i) {
    if (host) return timed[i].returned - timed[i].called;
    cuEventSynchronize(timed[i].after);
    return microseconds(timed[i].before, timed[i].after);
}

static float waited(long i) {
    if (!i) return 0.0f;
    if (host) return timed[i].called - timed[i - 1].returned;
    return microseconds(timed[i - 1].after, timed[i].before);
}

static void write_times(void) {
    const char *path = getenv("TIMES");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    for (long i = 0; i < count; i++) {
        const char *name = "?";
        if (name_of) name_of(&name, timed[i].kernel);
        fprintf(file, "%s|%u,%u,%u|%u|%.2f|%.2f\n", name, timed[i].cubes[0], timed[i].cubes[1], timed[i].cubes[2],
                timed[i].units, took(i), waited(i));
    }
    fclose(file);
}

/* CubeCL launches from one thread a device. */
Result cuLaunchKernel(Handle kernel, unsigned x, unsigned y, unsigned z, unsigned units_x, unsigned units_y, unsigned units_z,
                      unsigned shared, Handle stream, void **arguments, void **extra) {
    if (!launch) begin();
    long i = launches++ - skip;
    if (i == count) write_times();
    int kept = i >= 0 && i < count;
    if (kept) {
        timed[i].kernel = kernel;
        timed[i].cubes[0] = x, timed[i].cubes[1] = y, timed[i].cubes[2] = z;
        timed[i].units = units_x * units_y * units_z;
    }
    if (kept && !host) {
        cuEventCreate(&timed[i].before, 0);
        cuEventCreate(&timed[i].after, 0);
        cuEventRecord(timed[i].before, stream);
    }
    if (kept) timed[i].called = now();
    Result result = launch(kernel, x, y, z, units_x, units_y, units_z, shared, stream, arguments, extra);
    if (kept) timed[i].returned = now();
    if (kept && !host) cuEventRecord(timed[i].after, stream);
    return result;
}
