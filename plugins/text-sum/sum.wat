;; The sum of two ranks' float32 values, written by hand: what docs/PLUGINS.md describes needs no SDK and no compiler.
;;
;; Memory: the table at 0, the call at 64, the operands from 65,536 on, of which the left one becomes the result.
(module
  (@custom "ronde.manifest"
    "{\"abi\": 1, \"name\": \"text-sum\", \"version\": \"1.0.0\", \"about\": \"The sum of two, in WebAssembly text\","
    " \"kinds\": {\"reducer\": {\"dtypes\": [\"float32\"], \"shape\": \"pairwise\", \"commutative\": true}},"
    " \"parameters\": [], \"limits\": {\"memory_bytes\": 131072, \"call_ms\": 20, \"ranks\": 2}}")

  (memory (export "memory") 2 2)

  (data (i32.const 0)
    "\01\00\00\00"   ;; ABI version 1
    "\40\00\00\00"   ;; the call, at 64
    "\00\00\00\00"   ;; no block of parameters
    "\00\00\00\00"
    "\00\00\01\00"   ;; the input, at 65,536
    "\00\00\01\00"   ;; of 65,536 bytes
    "\00\00\01\00"   ;; the output, in the left operand's place
    "\00\80\00\00"   ;; of 32,768 bytes
    ;; neither state nor measures: the rest is zero
    )

  (func (export "ronde_abi") (result i32) (i32.const 1))
  (func (export "ronde_place") (result i32) (i32.const 0))
  (func (export "ronde_configure") (result i32) (i32.const 0))

  ;; Operands are lines of 64 bytes, and the second begins one stride after the first. Sums are made 256 bytes at a time,
  ;; because each round of a loop also looks at the clock; what lies behind the end is added, too: there the right operand
  ;; begins, which has been read by then.
  (func (export "ronde_reduce") (result i32)
    (local $left i32) (local $right i32) (local $sum i32) (local $end i32)
    (local.set $left (i32.const 65536))
    (local.set $end (i32.add (local.get $left) (i32.load (i32.const 120))))
    (local.set $right (local.get $end))
    (local.set $sum (i32.const 65536))
    (block $done
      (loop $lines
        (br_if $done (i32.ge_u (local.get $left) (local.get $end)))
        (v128.store (local.get $sum)
          (f32x4.add (v128.load (local.get $left)) (v128.load (local.get $right))))
        (v128.store offset=16 (local.get $sum)
          (f32x4.add (v128.load offset=16 (local.get $left)) (v128.load offset=16 (local.get $right))))
        (v128.store offset=32 (local.get $sum)
          (f32x4.add (v128.load offset=32 (local.get $left)) (v128.load offset=32 (local.get $right))))
        (v128.store offset=48 (local.get $sum)
          (f32x4.add (v128.load offset=48 (local.get $left)) (v128.load offset=48 (local.get $right))))
        (v128.store offset=64 (local.get $sum)
          (f32x4.add (v128.load offset=64 (local.get $left)) (v128.load offset=64 (local.get $right))))
        (v128.store offset=80 (local.get $sum)
          (f32x4.add (v128.load offset=80 (local.get $left)) (v128.load offset=80 (local.get $right))))
        (v128.store offset=96 (local.get $sum)
          (f32x4.add (v128.load offset=96 (local.get $left)) (v128.load offset=96 (local.get $right))))
        (v128.store offset=112 (local.get $sum)
          (f32x4.add (v128.load offset=112 (local.get $left)) (v128.load offset=112 (local.get $right))))
        (v128.store offset=128 (local.get $sum)
          (f32x4.add (v128.load offset=128 (local.get $left)) (v128.load offset=128 (local.get $right))))
        (v128.store offset=144 (local.get $sum)
          (f32x4.add (v128.load offset=144 (local.get $left)) (v128.load offset=144 (local.get $right))))
        (v128.store offset=160 (local.get $sum)
          (f32x4.add (v128.load offset=160 (local.get $left)) (v128.load offset=160 (local.get $right))))
        (v128.store offset=176 (local.get $sum)
          (f32x4.add (v128.load offset=176 (local.get $left)) (v128.load offset=176 (local.get $right))))
        (v128.store offset=192 (local.get $sum)
          (f32x4.add (v128.load offset=192 (local.get $left)) (v128.load offset=192 (local.get $right))))
        (v128.store offset=208 (local.get $sum)
          (f32x4.add (v128.load offset=208 (local.get $left)) (v128.load offset=208 (local.get $right))))
        (v128.store offset=224 (local.get $sum)
          (f32x4.add (v128.load offset=224 (local.get $left)) (v128.load offset=224 (local.get $right))))
        (v128.store offset=240 (local.get $sum)
          (f32x4.add (v128.load offset=240 (local.get $left)) (v128.load offset=240 (local.get $right))))
        (local.set $left (i32.add (local.get $left) (i32.const 256)))
        (local.set $right (i32.add (local.get $right) (i32.const 256)))
        (local.set $sum (i32.add (local.get $sum) (i32.const 256)))
        (br $lines)))
    (i32.const 0)))
