// Operand lists of wgmma: names of the first 8 n registers, and the accumulators behind them. Without #pragma once: a
// header includes it in front of its own macros, and operand_lists_end.cuh behind their users.
// clang-format off: a line a list

#define FX_N8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define FX_NAMES_16 FX_N8(0, 1, 2, 3, 4, 5, 6, 7) "," FX_N8(8, 9, 10, 11, 12, 13, 14, 15)
#define FX_NAMES_24 FX_NAMES_16 "," FX_N8(16, 17, 18, 19, 20, 21, 22, 23)
#define FX_NAMES_32                                                            \
  FX_N8(0, 1, 2, 3, 4, 5, 6, 7)                                                \
  "," FX_N8(8, 9, 10, 11, 12, 13, 14, 15) "," FX_N8(16, 17, 18, 19, 20, 21, 22, 23) "," FX_N8(24, 25, 26, 27, 28, 29, 30, 31)
#define FX_NAMES_40 FX_NAMES_32 "," FX_N8(32, 33, 34, 35, 36, 37, 38, 39)
#define FX_NAMES_48 FX_NAMES_40 "," FX_N8(40, 41, 42, 43, 44, 45, 46, 47)
#define FX_NAMES_56 FX_NAMES_48 "," FX_N8(48, 49, 50, 51, 52, 53, 54, 55)
#define FX_NAMES_64 FX_NAMES_56 "," FX_N8(56, 57, 58, 59, 60, 61, 62, 63)
#define FX_NAMES_72 FX_NAMES_64 "," FX_N8(64, 65, 66, 67, 68, 69, 70, 71)
#define FX_NAMES_80 FX_NAMES_72 "," FX_N8(72, 73, 74, 75, 76, 77, 78, 79)
#define FX_NAMES_88 FX_NAMES_80 "," FX_N8(80, 81, 82, 83, 84, 85, 86, 87)
#define FX_NAMES_96 FX_NAMES_88 "," FX_N8(88, 89, 90, 91, 92, 93, 94, 95)
#define FX_NAMES_128                                                                                     \
  FX_NAMES_96 "," FX_N8(96, 97, 98, 99, 100, 101, 102, 103) "," FX_N8(104, 105, 106, 107, 108, 109, 110, 111) "," FX_N8( \
      112, 113, 114, 115, 116, 117, 118, 119) "," FX_N8(120, 121, 122, 123, 124, 125, 126, 127)

#define FX_D8(i)                                                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FX_REGS_16 FX_D8(0), FX_D8(8)
#define FX_REGS_24 FX_REGS_16, FX_D8(16)
#define FX_REGS_32 FX_D8(0), FX_D8(8), FX_D8(16), FX_D8(24)
#define FX_REGS_40 FX_REGS_32, FX_D8(32)
#define FX_REGS_48 FX_REGS_40, FX_D8(40)
#define FX_REGS_56 FX_REGS_48, FX_D8(48)
#define FX_REGS_64 FX_REGS_56, FX_D8(56)
#define FX_REGS_72 FX_REGS_64, FX_D8(64)
#define FX_REGS_80 FX_REGS_72, FX_D8(72)
#define FX_REGS_88 FX_REGS_80, FX_D8(80)
#define FX_REGS_96 FX_REGS_88, FX_D8(88)
#define FX_REGS_128 FX_REGS_96, FX_D8(96), FX_D8(104), FX_D8(112), FX_D8(120)
// clang-format on
