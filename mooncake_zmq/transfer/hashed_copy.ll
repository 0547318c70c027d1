; A copy that makes the xxh3-64 of its bytes on the way: see hashed_copy.py, which compiles this for the CPU at hand.
;
; For more than 240 bytes, without a seed, as xxHash's specification has it: eight sums run over stripes of 64 bytes, each
; stripe under another part of the secret; they are scrambled after every 16 stripes, take in the last 64 bytes once more, and
; are folded into one. LLVM cuts vectors of 8 into what the CPU has. Words are little-endian, as on all CPUs that we run on.

@secret = private constant [24 x i64] [
  i64 u0xBE4BA423396CFEB8, i64 u0x1CAD21F72C81017C, i64 u0xDB979083E96DD4DE, i64 u0x1F67B3B7A4A44072,
  i64 u0x78E5C0CC4EE679CB, i64 u0x2172FFCC7DD05A82, i64 u0x8E2443F7744608B8, i64 u0x4C263A81E69035E0,
  i64 u0xCB00C391BB52283C, i64 u0xA32E531B8B65D088, i64 u0x4EF90DA297486471, i64 u0xD8ACDEA946EF1938,
  i64 u0x3F349CE33F76FAA8, i64 u0x1D4F0BC7C7BBDCF9, i64 u0x3159B4CD4BE0518A, i64 u0x647378D9C97E9FC8,
  i64 u0xC3EBD33483ACC5EA, i64 u0xEB6313FAFFA081C5, i64 u0x49DAF0B751DD0D17, i64 u0x9E68D429265516D3,
  i64 u0xFCA1477D58BE162B, i64 u0xCE31D07AD1B8F88F, i64 u0x280416958F3ACB45, i64 u0x7E404BBBCAFBD7AF
]

declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i64 @llvm.umin.i64(i64, i64)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

; The sums with a stripe, under the secret from byte %at on.
define internal <8 x i64> @add(<8 x i64> %sums, <8 x i64> %stripe, i64 %at) alwaysinline {
  %where = getelementptr i8, ptr @secret, i64 %at
  %secret = load <8 x i64>, ptr %where, align 1
  %key = xor <8 x i64> %stripe, %secret
  %low = and <8 x i64> %key, splat (i64 u0xFFFFFFFF)
  %high = lshr <8 x i64> %key, splat (i64 32)
  %product = mul <8 x i64> %low, %high
  %crossed = shufflevector <8 x i64> %stripe, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %both = add <8 x i64> %product, %crossed
  %result = add <8 x i64> %sums, %both
  ret <8 x i64> %result
}

; Both halves of a product of 128 bits.
define internal i64 @fold(i64 %one, i64 %other) alwaysinline {
  %a = zext i64 %one to i128
  %b = zext i64 %other to i128
  %product = mul i128 %a, %b
  %shifted = lshr i128 %product, 64
  %folded = xor i128 %product, %shifted
  %result = trunc i128 %folded to i64
  ret i64 %result
}

; Copies %size bytes, more than 240, between %whole and the places that %spans tells of, one after another, each by its address
; and bytes: out of %whole, or into it. The places hold %size bytes together, all but the last of them whole stripes.
define i64 @copy_hashed(ptr %whole, ptr %spans, i64 %size, i64 %outward) {
start:
  %all_but_one = sub i64 %size, 1
  %stripes = lshr i64 %all_but_one, 6
  %is_outward = icmp ne i64 %outward, 0
  %is_much = icmp uge i64 %size, 1048576 ; with its source, all that a core's own cache holds
  br label %span

span:
  %row = phi ptr [%spans, %start], [%next_row, %ended]
  %begun = phi i64 [0, %start], [%number_ended, %ended]
  %sums_begun = phi <8 x i64> [<i64 u0xC2B2AE3D, i64 u0x9E3779B185EBCA87, i64 u0xC2B2AE3D27D4EB4F, i64 u0x165667B19E3779F9,
                                i64 u0x85EBCA77C2B2AE63, i64 u0x85EBCA77, i64 u0x27D4EB2F165667C5, i64 u0x9E3779B1>, %start],
                              [%sums_ended, %ended]
  %place = load ptr, ptr %row, align 8
  %bytes_at = getelementptr i8, ptr %row, i64 8
  %place_bytes = load i64, ptr %bytes_at, align 8
  %begun_offset = shl i64 %begun, 6
  %here = getelementptr i8, ptr %whole, i64 %begun_offset
  %source = select i1 %is_outward, ptr %here, ptr %place
  %target = select i1 %is_outward, ptr %place, ptr %here
  %own_stripes = lshr i64 %place_bytes, 6
  %stripes_left = sub i64 %stripes, %begun
  %turns = call i64 @llvm.umin.i64(i64 %own_stripes, i64 %stripes_left)
  %stop = add i64 %begun, %turns
  %last_byte = sub i64 %place_bytes, 1
  %where = ptrtoint ptr %target to i64
  %beside = and i64 %where, 63
  %is_aligned = icmp eq i64 %beside, 0
  %is_past = and i1 %is_aligned, %is_much
  %has_stripes = icmp ne i64 %turns, 0
  br i1 %has_stripes, label %stripe, label %ended

stripe:
  %number = phi i64 [%begun, %span], [%next_number, %next]
  %sums = phi <8 x i64> [%sums_begun, %span], [%next_sums, %next]
  %turn = sub i64 %number, %begun
  %offset = shl i64 %turn, 6
  %from = getelementptr i8, ptr %source, i64 %offset
  %to = getelementptr i8, ptr %target, i64 %offset
  %page_on = add i64 %offset, 4096
  %ahead = call i64 @llvm.umin.i64(i64 %page_on, i64 %last_byte)
  %soon = getelementptr i8, ptr %source, i64 %ahead
  call void @llvm.prefetch.p0(ptr %soon, i32 0, i32 3, i32 1)
  %bytes = load <8 x i64>, ptr %from, align 1
  br i1 %is_past, label %past, label %within

past:
  store <8 x i64> %bytes, ptr %to, align 64, !nontemporal !0
  br label %sum

within:
  store <8 x i64> %bytes, ptr %to, align 1
  br label %sum

sum:
  %of_block = and i64 %number, 15
  %at = shl i64 %of_block, 3
  %more = call <8 x i64> @add(<8 x i64> %sums, <8 x i64> %bytes, i64 %at)
  %is_end = icmp eq i64 %of_block, 15
  br i1 %is_end, label %scramble, label %next

scramble:
  %shifted = lshr <8 x i64> %more, splat (i64 47)
  %mixed = xor <8 x i64> %more, %shifted
  %scrambling = getelementptr i8, ptr @secret, i64 128
  %scrambler = load <8 x i64>, ptr %scrambling, align 1
  %keyed = xor <8 x i64> %mixed, %scrambler
  %scrambled = mul <8 x i64> %keyed, splat (i64 u0x9E3779B1)
  br label %next

next:
  %next_sums = phi <8 x i64> [%more, %sum], [%scrambled, %scramble]
  %next_number = add i64 %number, 1
  %is_last = icmp eq i64 %next_number, %stop
  br i1 %is_last, label %ended, label %stripe

ended:
  %number_ended = phi i64 [%begun, %span], [%next_number, %next]
  %sums_ended = phi <8 x i64> [%sums_begun, %span], [%next_sums, %next]
  %taken = shl i64 %turns, 6
  %next_row = getelementptr i8, ptr %row, i64 16
  %is_rest_here = icmp ult i64 %taken, %place_bytes
  br i1 %is_rest_here, label %rest, label %span

rest: ; from 1 to 64 bytes
  fence seq_cst ; what went past the cache is there before anything that is stored from now on
  %done = shl i64 %stripes, 6
  %left = sub i64 %size, %done
  %rest_from = getelementptr i8, ptr %source, i64 %taken
  %rest_to = getelementptr i8, ptr %target, i64 %taken
  call void @llvm.memcpy.p0.p0.i64(ptr %rest_to, ptr %rest_from, i64 %left, i1 false)
  %last_offset = sub i64 %size, 64
  %last_at = getelementptr i8, ptr %whole, i64 %last_offset ; into it, this is what arrived: no byte is read twice from its source
  %last = load <8 x i64>, ptr %last_at, align 1
  %all = call <8 x i64> @add(<8 x i64> %sums_ended, <8 x i64> %last, i64 121)
  %folding = getelementptr i8, ptr @secret, i64 11
  %folder = load <8 x i64>, ptr %folding, align 1
  %lanes = xor <8 x i64> %all, %folder
  %total0 = mul i64 %size, u0x9E3779B185EBCA87
  %even0 = extractelement <8 x i64> %lanes, i32 0
  %odd0 = extractelement <8 x i64> %lanes, i32 1
  %folded0 = call i64 @fold(i64 %even0, i64 %odd0)
  %total1 = add i64 %total0, %folded0
  %even1 = extractelement <8 x i64> %lanes, i32 2
  %odd1 = extractelement <8 x i64> %lanes, i32 3
  %folded1 = call i64 @fold(i64 %even1, i64 %odd1)
  %total2 = add i64 %total1, %folded1
  %even2 = extractelement <8 x i64> %lanes, i32 4
  %odd2 = extractelement <8 x i64> %lanes, i32 5
  %folded2 = call i64 @fold(i64 %even2, i64 %odd2)
  %total3 = add i64 %total2, %folded2
  %even3 = extractelement <8 x i64> %lanes, i32 6
  %odd3 = extractelement <8 x i64> %lanes, i32 7
  %folded3 = call i64 @fold(i64 %even3, i64 %odd3)
  %total4 = add i64 %total3, %folded3
  %high = lshr i64 %total4, 37
  %once = xor i64 %total4, %high
  %spread = mul i64 %once, u0x165667919E3779F9
  %higher = lshr i64 %spread, 32
  %checksum = xor i64 %spread, %higher
  ret i64 %checksum
}

!0 = !{i32 1}
