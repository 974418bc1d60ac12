//! The driver: what is missing is named, and nothing is left behind.

use std::path::Path;

use ronde_gpu::{Context, Driver, Event, GpuError, Stream};

use crate::device::{Device, caller, library};

#[test]
fn a_missing_library_is_named() {
    let error = Driver::open(Path::new("libcuda-that-is-not-there.so.1")).expect_err("no such file");
    assert!(matches!(error, GpuError::NoLibrary { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("libcuda-that-is-not-there.so.1") && text.contains("Install NVIDIA's driver"), "{text}");
}

#[test]
fn another_library_lacks_the_functions() {
    let error = Driver::open(Path::new("libc.so.6")).expect_err("no driver");
    assert_eq!(error, GpuError::NoFunction { library: "libcuda.so.1", function: "cuInit" });
}

#[test]
fn a_driver_without_a_device_is_named() {
    let device = Device::take();
    device.fail("cuInit", 100, 1);
    let error = Driver::open(&library()).expect_err("no device");
    assert!(matches!(&error, GpuError::NoDevice { reason } if reason.contains("CUDA_ERROR_NO_DEVICE")), "{error:?}");
    assert!(error.to_string().contains("nvidia-smi"), "{error}");
}

#[test]
fn devices_are_described() {
    let device = Device::take();
    assert_eq!((device.driver.devices(), device.driver.version()), (2, (12, 4)));
    let info = device.driver.info(1).expect("it exists");
    assert_eq!((info.ordinal, info.bus_id.as_str(), info.peers.as_slice()), (1, "0000:02:00.0", &[0][..]));
    assert!(info.name.contains("software device") && info.memory_bytes > 0);
    let error = device.driver.info(2).expect_err("only two");
    assert!(error.is_callers() && error.to_string().contains("there is no GPU 2"), "{error}");
}

#[test]
fn everything_is_released_also_when_calls_fail() {
    let device = Device::take();
    let before = ["contexts", "streams", "events"].map(|name| device.count(name));
    {
        let context = Context::retain(&device.driver, 0).expect("a device");
        let stream = Stream::new(&context).expect("a stream");
        let _event = Event::after(&stream).expect("an event");
        device.fail("cuEventRecord", 400, 1);
        Event::after(&stream).expect_err("it cannot be recorded");
        device.fail("cuStreamCreate", 2, 1);
        let error = Stream::new(&context).expect_err("no memory");
        assert!(matches!(error, GpuError::OutOfMemory { function: "cuStreamCreate", .. }), "{error:?}");
        assert!(error.to_string().contains("out of memory"), "{error}");
        device.fail("cuStreamWaitEvent", 999, 1);
        let error =
            stream.wait(&Event::after_caller(&context, caller(0)).expect("an event")).expect_err("a bad driver");
        assert!(error.to_string().contains("CUDA_ERROR_UNKNOWN (999)"), "{error}");
    }
    assert_eq!(["contexts", "streams", "events"].map(|name| device.count(name)), before);
}

#[test]
fn drops_do_not_panic_when_the_driver_refuses_everything() {
    let device = Device::take();
    let context = Context::retain(&device.driver, 1).expect("a device");
    let stream = Stream::new(&context).expect("a stream");
    let event = Event::after(&stream).expect("an event");
    for function in ["cuCtxPushCurrent_v2", "cuEventDestroy_v2", "cuStreamDestroy_v2", "cuDevicePrimaryCtxRelease_v2"] {
        device.fail(function, 4, 0);
    }
    drop((event, stream, context));
}
