/* A CUDA driver without a GPU, for tests: "device" memory is host memory, and a kernel is looked up and never run.
   Each launch appends a line to the file that STUB_LAUNCHES names: kind, grid, threads, stream, the first two arguments.
   What is not defined here answers success and does nothing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned u;
typedef unsigned long long u64;

static int nothing(void) { return 0; }
int cuInit(u flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int status, const char **name) { *name = "CUDA_ERROR_OF_THE_STUB"; return 0; }
int cuGetErrorString(int status, const char **text) { *text = "an error of the stub"; return 0; }

int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Stub of a GPU"); return 0; }
int cuDeviceCanAccessPeer(int *can, int device, int other) { *can = 1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) { /* of CUdevice_attribute */
  case 1: *value = 1024; break;  /* threads a block */
  case 10: *value = 32; break;   /* threads a warp */
  case 16: *value = 132; break;  /* multiprocessors */
  case 75: *value = 9; break;    /* compute capability 9.0 */
  case 95: *value = 1; break;    /* cooperative launches */
  default: *value = 0;
  }
  return 0;
}

static char context;
static void *current;
int cuDevicePrimaryCtxRetain(void **given, int device) { *given = &context; return 0; }
int cuCtxGetCurrent(void **given) { *given = current; return 0; }
int cuCtxSetCurrent(void *given) { current = given; return 0; }
int cuCtxPushCurrent_v2(void *given) { current = given; return 0; }
int cuCtxPopCurrent_v2(void **given) { *given = current; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }

int cuMemGetInfo_v2(size_t *available, size_t *total) { *available = *total = (size_t)1 << 34; return 0; }
int cuMemAlloc_v2(u64 *address, size_t bytes) { *address = (u64)calloc(1, bytes); return 0; }
int cuMemFree_v2(u64 address) { free((void *)address); return 0; }
int cuMemcpyHtoD_v2(u64 target, const void *source, size_t bytes) { memcpy((void *)target, source, bytes); return 0; }
int cuMemcpyDtoH_v2(void *target, u64 source, size_t bytes) { memcpy(target, (void *)source, bytes); return 0; }
int cuMemsetD8_v2(u64 target, unsigned char byte, size_t bytes) { memset((void *)target, byte, bytes); return 0; }

int cuLibraryLoadData(void **library, const void *code, void *a, void *b, u c, void *d, void *e, u f) {
  *library = malloc(1);
  return 0;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = malloc(1); return 0; }
int cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return 0; }
int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { *value = 64; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
  *blocks = 2;
  return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, void *f, int threads, size_t shared, u flags) {
  *blocks = 2;
  return 0;
}

static int note(const char *kind, u x, u y, u threads, void *stream, void **arguments) {
  const char *path = getenv("STUB_LAUNCHES");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return 0;
  fprintf(file, "%s %u %u %u %llu %llu %llu\n", kind, x, y, threads, (u64)stream, *(u64 *)arguments[0],
          *(u64 *)arguments[1]);
  fclose(file);
  return 0;
}
int cuLaunchKernel(void *f, u x, u y, u z, u threads, u j, u k, u shared, void *stream, void **given, void **extra) {
  return note("plain", x, y, threads, stream, given);
}
int cuLaunchCooperativeKernel(void *f, u x, u y, u z, u threads, u j, u k, u shared, void *stream, void **given) {
  return note("cooperative", x, y, threads, stream, given);
}
struct configuration { /* CUlaunchConfig */
  u grid[3], threads[3], shared;
  void *stream, *attributes;
  u count;
};
int cuLaunchKernelEx(const struct configuration *how, void *f, void **given, void **extra) {
  return note("extended", how->grid[0], how->grid[1], how->threads[0], how->stream, given);
}

int cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *status) {
  char newer[128];
  snprintf(newer, sizeof newer, "%s_v2", name);
  *function = dlsym(RTLD_DEFAULT, newer);
  if (!*function) *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void *)nothing;
  if (status) *status = 0;
  return 0;
}
int cuGetProcAddress(const char *name, void **function, int version, u64 flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
