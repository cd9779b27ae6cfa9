/* Counts the calls of MPI that a process makes, and the bytes it passes to them.

       mpicc -O2 -shared -fPIC -o libmpi_counts.so mpi_counts.c
       LD_PRELOAD=./libmpi_counts.so python ...

   A process reads its counts from `mpi_counts`, `mpi_bytes` and `mpi_names`, arrays of
   `mpi_kinds` entries. Bytes are those that a rank sends, by itself or for its part of a
   collective, and for a gather those that it receives of all. */

#include <mpi.h>
#include <stdint.h>

#define KINDS(X)                                                                       \
    X(Send) X(Isend) X(Recv) X(Iprobe) X(Improbe) X(Mrecv) X(Test) X(Barrier)           \
    X(Ibarrier) X(Bcast) X(Ibcast) X(Reduce) X(Allreduce) X(Iallreduce) X(Scan)         \
    X(Exscan) X(Gather) X(Gatherv) X(Allgather) X(Iallgather) X(Allgatherv)             \
    X(Iallgatherv) X(Igather) X(Igatherv) X(Ialltoallv)                                 \
    X(Scatter) X(Scatterv) X(Alltoall) X(Alltoallv) X(Reduce_scatter) X(Comm_dup)       \
    X(Comm_split) X(Comm_split_type) X(Comm_create_group) X(Win_allocate_shared)        \
    X(Win_create)

enum {
#define NUMBER(name) k##name,
    KINDS(NUMBER) mpi_kinds_count
};
const int mpi_kinds = mpi_kinds_count;
const char *mpi_names[] = {
#define NAME(name) #name,
    KINDS(NAME)};
int64_t mpi_counts[mpi_kinds_count], mpi_bytes[mpi_kinds_count];

static void note(int kind, int64_t count, MPI_Datatype type) {
    int size = 0;
    if (count && type != MPI_DATATYPE_NULL)
        PMPI_Type_size(type, &size);
    mpi_counts[kind]++;
    mpi_bytes[kind] += count * size;
}

static int64_t size_of(MPI_Comm comm) {
    int size = 0;
    PMPI_Comm_size(comm, &size);
    return size;
}

/* mpi4py takes the functions with large counts, whose names end in _c, where MPI has
   them: Open MPI 5 does not */
#ifdef OPEN_MPI
#define BOTH(name, args, pass, count, type)                                             \
    int MPI_##name args(int) { note(k##name, count, type); return PMPI_##name pass; }
#else
#define BOTH(name, args, pass, count, type)                                             \
    int MPI_##name args(int) { note(k##name, count, type); return PMPI_##name pass; }   \
    int MPI_##name##_c args(MPI_Count) {                                                \
        note(k##name, count, type);                                                     \
        return PMPI_##name##_c pass;                                                    \
    }
#endif
#define ONE(name, args, pass)                                                           \
    int MPI_##name args { note(k##name, 0, MPI_DATATYPE_NULL); return PMPI_##name pass; }

#define TO(I) (const void *b, I n, MPI_Datatype t, int r, int g, MPI_Comm c)
BOTH(Send, TO, (b, n, t, r, g, c), n, t)
#define ITO(I) (const void *b, I n, MPI_Datatype t, int r, int g, MPI_Comm c, MPI_Request *q)
BOTH(Isend, ITO, (b, n, t, r, g, c, q), n, t)
#define FROM(I) (void *b, I n, MPI_Datatype t, int r, int g, MPI_Comm c, MPI_Status *s)
BOTH(Recv, FROM, (b, n, t, r, g, c, s), 0, t)
#define MFROM(I) (void *b, I n, MPI_Datatype t, MPI_Message *m, MPI_Status *s)
BOTH(Mrecv, MFROM, (b, n, t, m, s), 0, t)
#define ROOTED(I) (void *b, I n, MPI_Datatype t, int r, MPI_Comm c)
BOTH(Bcast, ROOTED, (b, n, t, r, c), n, t)
#define IROOTED(I) (void *b, I n, MPI_Datatype t, int r, MPI_Comm c, MPI_Request *q)
BOTH(Ibcast, IROOTED, (b, n, t, r, c, q), n, t)
#define TOROOT(I)                                                                       \
    (const void *b, void *o, I n, MPI_Datatype t, MPI_Op p, int r, MPI_Comm c)
BOTH(Reduce, TOROOT, (b, o, n, t, p, r, c), n, t)
#define ALL(I) (const void *b, void *o, I n, MPI_Datatype t, MPI_Op p, MPI_Comm c)
BOTH(Allreduce, ALL, (b, o, n, t, p, c), n, t)
BOTH(Scan, ALL, (b, o, n, t, p, c), n, t)
BOTH(Exscan, ALL, (b, o, n, t, p, c), n, t)
#define IALL(I)                                                                         \
    (const void *b, void *o, I n, MPI_Datatype t, MPI_Op p, MPI_Comm c, MPI_Request *q)
BOTH(Iallreduce, IALL, (b, o, n, t, p, c, q), n, t)
#define EACH(I)                                                                         \
    (const void *b, I n, MPI_Datatype t, void *o, I m, MPI_Datatype u, MPI_Comm c)
BOTH(Allgather, EACH, (b, n, t, o, m, u, c), m * size_of(c), u)
BOTH(Alltoall, EACH, (b, n, t, o, m, u, c), m * size_of(c), u)
#define IEACH(I)                                                                        \
    (const void *b, I n, MPI_Datatype t, void *o, I m, MPI_Datatype u, MPI_Comm c,       \
     MPI_Request *q)
BOTH(Iallgather, IEACH, (b, n, t, o, m, u, c, q), m * size_of(c), u)
#define ATROOT(I)                                                                       \
    (const void *b, I n, MPI_Datatype t, void *o, I m, MPI_Datatype u, int r, MPI_Comm c)
BOTH(Gather, ATROOT, (b, n, t, o, m, u, r, c), n, t)
BOTH(Scatter, ATROOT, (b, n, t, o, m, u, r, c), m, u)
#define IATROOT(I)                                                                      \
    (const void *b, I n, MPI_Datatype t, void *o, I m, MPI_Datatype u, int r, MPI_Comm c,\
     MPI_Request *q)
BOTH(Igather, IATROOT, (b, n, t, o, m, u, r, c, q), n, t)

ONE(Iprobe, (int r, int g, MPI_Comm c, int *f, MPI_Status *s), (r, g, c, f, s))
ONE(Improbe, (int r, int g, MPI_Comm c, int *f, MPI_Message *m, MPI_Status *s),
    (r, g, c, f, m, s))
ONE(Test, (MPI_Request *q, int *f, MPI_Status *s), (q, f, s))
ONE(Barrier, (MPI_Comm c), (c))
ONE(Ibarrier, (MPI_Comm c, MPI_Request *q), (c, q))
ONE(Comm_dup, (MPI_Comm c, MPI_Comm *o), (c, o))
ONE(Comm_split, (MPI_Comm c, int a, int k, MPI_Comm *o), (c, a, k, o))
ONE(Comm_split_type, (MPI_Comm c, int a, int k, MPI_Info i, MPI_Comm *o), (c, a, k, i, o))
ONE(Comm_create_group, (MPI_Comm c, MPI_Group g, int t, MPI_Comm *o), (c, g, t, o))
ONE(Win_allocate_shared, (MPI_Aint n, int d, MPI_Info i, MPI_Comm c, void *b, MPI_Win *w),
    (n, d, i, c, b, w))

/* Lengths that differ: the bytes of all */
static int64_t sum_of(MPI_Comm comm, const int *counts) {
    int64_t sum = 0;
    for (int64_t r = 0; r < size_of(comm); r++)
        sum += counts[r];
    return sum;
}
#ifndef OPEN_MPI
static int64_t sum_of_c(MPI_Comm comm, const MPI_Count *counts) {
    int64_t sum = 0;
    for (int64_t r = 0; r < size_of(comm); r++)
        sum += counts[r];
    return sum;
}
#endif
#define ALLV(name, suffix, I, D)                                                        \
    int MPI_##name(const void *b, I n, MPI_Datatype t, void *o, const I m[], const D d[],\
                   MPI_Datatype u, MPI_Comm c) {                                        \
        note(kAllgatherv, sum_of##suffix(c, m), u);                                      \
        return PMPI_##name(b, n, t, o, m, d, u, c);                                     \
    }
ALLV(Allgatherv, , int, int)
#define IALLV(name, suffix, I, D)                                                       \
    int MPI_##name(const void *b, I n, MPI_Datatype t, void *o, const I m[], const D d[],\
                   MPI_Datatype u, MPI_Comm c, MPI_Request *q) {                        \
        note(kIallgatherv, sum_of##suffix(c, m), u);                                     \
        return PMPI_##name(b, n, t, o, m, d, u, c, q);                                  \
    }
IALLV(Iallgatherv, , int, int)
#define GATHERV(name, I, D)                                                             \
    int MPI_##name(const void *b, I n, MPI_Datatype t, void *o, const I m[], const D d[],\
                   MPI_Datatype u, int r, MPI_Comm c) {                                 \
        note(kGatherv, n, t);                                                           \
        return PMPI_##name(b, n, t, o, m, d, u, r, c);                                  \
    }
GATHERV(Gatherv, int, int)
#define IGATHERV(name, I, D)                                                            \
    int MPI_##name(const void *b, I n, MPI_Datatype t, void *o, const I m[], const D d[],\
                   MPI_Datatype u, int r, MPI_Comm c, MPI_Request *q) {                 \
        note(kIgatherv, n, t);                                                          \
        return PMPI_##name(b, n, t, o, m, d, u, r, c, q);                               \
    }
IGATHERV(Igatherv, int, int)
#define EACHV(name, suffix, I, D)                                                       \
    int MPI_##name(const void *b, const I n[], const D e[], MPI_Datatype t, void *o,     \
                   const I m[], const D d[], MPI_Datatype u, MPI_Comm c) {              \
        note(kAlltoallv, sum_of##suffix(c, n), t);                                       \
        return PMPI_##name(b, n, e, t, o, m, d, u, c);                                  \
    }
EACHV(Alltoallv, , int, int)
#define IEACHV(name, suffix, I, D)                                                      \
    int MPI_##name(const void *b, const I n[], const D e[], MPI_Datatype t, void *o,     \
                   const I m[], const D d[], MPI_Datatype u, MPI_Comm c,                \
                   MPI_Request *q) {                                                    \
        note(kIalltoallv, sum_of##suffix(c, n), t);                                      \
        return PMPI_##name(b, n, e, t, o, m, d, u, c, q);                               \
    }
IEACHV(Ialltoallv, , int, int)

#ifndef OPEN_MPI
ALLV(Allgatherv_c, _c, MPI_Count, MPI_Aint)
GATHERV(Gatherv_c, MPI_Count, MPI_Aint)
EACHV(Alltoallv_c, _c, MPI_Count, MPI_Aint)
IALLV(Iallgatherv_c, _c, MPI_Count, MPI_Aint)
IGATHERV(Igatherv_c, MPI_Count, MPI_Aint)
IEACHV(Ialltoallv_c, _c, MPI_Count, MPI_Aint)
#endif
