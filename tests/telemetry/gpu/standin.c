/* A stand-in for NVIDIA's libnvidia-ml.so.1: two GPUs whose behaviour the file $NVML_STANDIN sets, read at each call.
   It holds words: "lost1" (GPU 1 falls off the bus), "hot0", "shared0", "old" (no energy counter, no field
   values), "nodriver", "ecc0", "deaf0" (no power and no energy for now). Power is 100 W and 200 W; counters follow the clock. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct { int index; } Device;
static Device devices[2] = {{0}, {1}};
static const char *uuids[2] = {"GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"};
enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, SHORT = 7, DRIVER_NOT_LOADED = 9, TIMED_OUT = 10, LOST = 15 };

static int set(const char *word) {
    char text[256] = "";
    const char *path = getenv("NVML_STANDIN");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    text[length] = 0;
    fclose(file);
    return strstr(text, word) != NULL;
}
double standin_now_s = 0;  /* set from outside: the clock that counters follow instead */
static double now(void) {
    struct timespec t;
    if (standin_now_s > 0) return standin_now_s;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}
static int gone(Device *d) { return d->index == 1 && set("lost1"); }
#define ALIVE(d) if (gone(d)) return LOST

int nvmlInitWithFlags(unsigned flags) { return set("nodriver") ? DRIVER_NOT_LOADED : OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "stand-in's error"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device **d) { *d = &devices[i]; return i < 2 ? OK : NOT_FOUND; }
int nvmlDeviceGetUUID(Device *d, char *text, unsigned n) { snprintf(text, n, "%s", uuids[d->index]); return OK; }
typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(Device *d, Utilization *u) { ALIVE(d); u->gpu = 80 + d->index; return OK; }
typedef struct { unsigned long long total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device *d, Memory *m) { ALIVE(d); m->used = (d->index + 1) * 1000ull; return OK; }
static int deaf(Device *d) { return d->index == 0 && set("deaf0"); }
int nvmlDeviceGetPowerUsage(Device *d, unsigned *mw) { ALIVE(d); if (deaf(d)) return TIMED_OUT; *mw = (d->index + 1) * 100000; return OK; }
int nvmlDeviceGetTemperature(Device *d, int sensor, unsigned *c) { ALIVE(d); *c = 60 + d->index; return OK; }
int nvmlDeviceGetClockInfo(Device *d, int type, unsigned *mhz) { ALIVE(d); *mhz = type == 1 ? 1500 : 2600; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(Device *d, unsigned long long *bits) {
    ALIVE(d);
    *bits = d->index == 0 && set("hot0") ? 0x40 : 0;
    return OK;
}
int nvmlDeviceGetTotalEnergyConsumption(Device *d, unsigned long long *mj) {
    ALIVE(d);
    if (set("old")) return NOT_SUPPORTED;
    if (deaf(d)) return TIMED_OUT;
    *mj = (unsigned long long)(now() * (d->index + 1) * 100e3);
    return OK;
}
int nvmlDeviceGetTotalEccErrors(Device *d, int type, int counter, unsigned long long *n) {
    ALIVE(d);
    if (d->index == 1) return NOT_SUPPORTED;
    *n = set("ecc0") ? 3 : 0;
    return OK;
}
typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    int valueType, nvmlReturn;
    union { double d; unsigned ui; unsigned long ul; unsigned long long ull; } value;
} Field;
int nvmlDeviceGetFieldValues(Device *d, int n, Field *fields) {
    ALIVE(d);
    if (set("old")) return NOT_SUPPORTED;
    for (int i = 0; i < n; i++) {
        Field *f = &fields[i];
        f->nvmlReturn = OK;
        f->valueType = 3;
        if (f->fieldId == 270) f->value.ull = d->index == 0 && set("hot0") ? (unsigned long long)(now() * 5e8) : 7;
        else f->nvmlReturn = NOT_SUPPORTED;
    }
    return OK;
}
typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *n, Process *found) {
    ALIVE(d);
    unsigned all = d->index == 0 && set("shared0") ? 2 : 1;
    if (*n < all) { *n = all; return SHORT; }
    *n = all;
    found[0].pid = getpid();
    if (all == 2) found[1].pid = 1;
    return OK;
}
