from services.monitor.service import main

main()
