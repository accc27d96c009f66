// PAGEMILL_X86: 1 when the build has code for x86 instruction sets, else 0.
#ifndef PAGEMILL_CSRC_CORE_X86_H_
#define PAGEMILL_CSRC_CORE_X86_H_

#if defined(__x86_64__) && !defined(PAGEMILL_SCALAR)
#define PAGEMILL_X86 1
#else
#define PAGEMILL_X86 0
#endif

#endif  // PAGEMILL_CSRC_CORE_X86_H_
